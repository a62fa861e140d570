"""Where ssh keeps the sockets of connections that `ssh.persist` keeps open."""

SOCKETS = "~/.ssh"
"""ssh takes ~ from the user database, not from HOME."""
