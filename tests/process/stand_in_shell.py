"""The part that stand-ins for ssh and similar commands share, written for sh."""

WITHOUT_OPTIONS = """
while :; do
    case "$1" in
        -o) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
"""
"""Leaves the host, and what it is to run, of the arguments."""
