"""What the keys of a job file may be: types, records of keys, and what to say of a mistake."""
