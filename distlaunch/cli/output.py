"""Results for machines."""

import json


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2))
