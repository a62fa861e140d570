"""One run seen from outside, by its folder: told again, followed to its end, stopped."""
