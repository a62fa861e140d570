"""The kinds of transports. Each is a frozen value that says how one node is reached:

* `name`, a Literal that no other kind has, for documents and histories;
* `here`: whether the node is this machine;
* `argv()`: the command line of a process whose stdin and stdout become the link;
* `together`: whether all nodes with an equal transport have one such process. It is sent the opening and the
  text of each node's agent one after another, and hands on the frames, each to the node that it names;
* `unknown`: whether the node's host is not known yet: some are known only inside an allocation;
* `environment(environ)`: what of our environment that process gets;
* `direct`: whether nothing that reads or prints, such as a shell with an rc file, stands between that process
  and the agent. Then the agent's text is sent at once;
* `patience_s`: how long that process may live when it is no longer wanted. 0 = it is killed, with all that it
  started; else it is asked to end, by SIGTERM, and killed so many seconds later; infinity = it never is: it
  is the node's guardian, which must outlive its agent to sweep;
* `folder`: one on this machine, below ~, that it needs and does not make itself; "" = none;
* `address_argv()`: a command that tells the address by which others may reach the node, in a line
  `hostname ADDRESS`; empty where there is none;
* `failure(end)`: what the process's end means; `advice(failure, python)`: what to do about it.

To add one: a module with such a type, and its name in `Transport`. A new way for it to fail is a `Kind` in
`failure.py`. A job file asks for it by `launcher`, whose words are in `job/fields.py`; `_reach` in
`job/build.py` makes it, and `_check_launcher` in `job/checks.py` knows what it needs.
"""

from distlaunch.transports.command import Command
from distlaunch.transports.joined import Joined
from distlaunch.transports.local import Local
from distlaunch.transports.slurm import Slurm
from distlaunch.transports.ssh import Ssh

Transport = Command | Joined | Local | Slurm | Ssh
