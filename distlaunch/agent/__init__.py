"""The bundle sent to a node.

It uses only the standard library, Python 3.8 and later, and no other modules of distlaunch.
"""
