"""The files of a testbed's Grid Engine: a cell. Its directory replaces the machine's own inside the hosts."""

from pathlib import Path

from .state import Testbed
from .tools import TestbedError

CELL = Path("/var/lib/gridengine/default")
PROGRAMS = Path("/usr/lib/gridengine")
SLOTS = 8
"""Slots of each host."""
PARALLEL = "mpi"
"""The parallel environment in which Grid Engine starts tasks on the hosts of a job."""
LOOSE = "loose"
"""A parallel environment whose jobs start their own tasks: `control_slaves FALSE`."""


def directory(testbed: Testbed) -> Path:
    """Return the directory for all Grid Engine files."""
    return testbed.dir / "grid-engine"


def write(testbed: Testbed) -> None:
    """Write the cell's files, before any host runs."""
    if not (PROGRAMS / "sge_qmaster").exists() or not (PROGRAMS / "sge_execd").exists():
        raise TestbedError(f"no Grid Engine in {PROGRAMS}: apt install gridengine-master gridengine-exec")
    if not CELL.is_dir():
        raise TestbedError(f"{CELL} does not exist: apt install --reinstall gridengine-common")
    where, names = directory(testbed), [host.name for host in testbed.hosts]
    for name in ("common", "spool/qmaster/job_scripts", "spool/execd"):
        (where / name).mkdir(parents=True)
    (where / "common/act_qmaster").write_text(f"{names[0]}\n")
    (where / "common/bootstrap").write_text(_BOOTSTRAP)
    (where / "configuration").write_text(_CONFIGURATION)
    (where / "scheduler").write_text(_SCHEDULER)
    for name, controls in ((PARALLEL, "TRUE"), (LOOSE, "FALSE")):
        (where / f"{name}.pe").write_text(_PE.format(name=name, controls=controls))
    (where / "hostgroup").write_text(f"group_name @allhosts\nhostlist {' '.join(names)}\n")
    # A job's directory is named after its number, so jobs of different testbeds would share one in /tmp.
    own = ",".join(f"[{name}={CELL}/tmp/{name}]" for name in names)
    (where / "queue").write_text(
        _QUEUE.format(pe_list=f"{PARALLEL} {LOOSE}", slots=SLOTS, directories=f"/tmp,{own}")
    )
    for name in names:
        (where / "tmp" / name).mkdir(parents=True)
        (where / f"{name}.host").write_text(_HOST.format(name=name))


_BOOTSTRAP = f"""\
admin_user none
default_domain none
ignore_fqdn false
spooling_method classic
spooling_lib libspoolc
spooling_params {CELL}/common;{CELL}/spool
binary_path /usr/sbin
qmaster_spool_dir {CELL}/spool/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
_CONFIGURATION = f"""\
conf_version 0
execd_spool_dir {CELL}/spool/execd
mailer /bin/true
xterm /bin/true
load_sensor none
prolog none
epilog none
shell_start_mode unix_behavior
login_shells bash,sh
min_uid 0
min_gid 0
user_lists none
xuser_lists none
projects none
xprojects none
enforce_project false
enforce_user auto
load_report_time 00:00:01
max_unheard 00:00:30
reschedule_unknown 00:00:00
loglevel log_info
administrator_mail none
set_token_cmd none
pag_cmd none
token_extend_time none
shepherd_cmd none
qmaster_params none
execd_params ENABLE_ADDGRP_KILL=TRUE
reporting_params accounting=true reporting=false flush_time=00:00:01 joblog=false sharelog=00:00:00
finished_jobs 100
gid_range 65400-65500
qlogin_command builtin
qlogin_daemon builtin
rlogin_command builtin
rlogin_daemon builtin
rsh_command builtin
rsh_daemon builtin
max_aj_instances 2000
max_aj_tasks 75000
max_u_jobs 0
max_jobs 0
auto_user_oticket 0
auto_user_fshare 0
auto_user_default_project none
auto_user_delete_time 86400
delegated_file_staging false
reprioritize 0
jsv_url none
jsv_allowed_mod ac,h,i,e,o,j,M,N,p,w
"""
_SCHEDULER = """\
algorithm default
schedule_interval 0:0:1
maxujobs 0
queue_sort_method load
job_load_adjustments NONE
load_adjustment_decay_time 0:0:0
load_formula np_load_avg
schedd_job_info true
flush_submit_sec 1
flush_finish_sec 1
params none
reprioritize_interval 0:0:0
halftime 168
usage_weight_list cpu=1.000000,mem=0.000000,io=0.000000
compensation_factor 5.000000
weight_user 0.250000
weight_project 0.250000
weight_department 0.250000
weight_job 0.250000
weight_tickets_functional 0
weight_tickets_share 0
share_override_tickets TRUE
share_functional_shares TRUE
max_functional_jobs_to_schedule 200
report_pjob_tickets TRUE
max_pending_tasks_per_job 50
halflife_decay_list none
policy_hierarchy OFS
weight_ticket 0.010000
weight_waiting_time 0.000000
weight_deadline 3600000.000000
weight_urgency 0.100000
weight_priority 1.000000
max_reservation 0
default_duration INFINITY
"""
_PE = """\
pe_name {name}
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule $round_robin
control_slaves {controls}
job_is_first_task FALSE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""
_HOST = """\
hostname {name}
load_scaling NONE
complex_values NONE
user_lists NONE
xuser_lists NONE
projects NONE
xprojects NONE
usage_scaling NONE
report_variables NONE
"""
_QUEUE = """\
qname all.q
hostlist @allhosts
seq_no 0
load_thresholds NONE
suspend_thresholds NONE
nsuspend 1
suspend_interval 00:05:00
priority 0
min_cpu_interval 00:05:00
processors UNDEFINED
qtype BATCH INTERACTIVE
ckpt_list NONE
pe_list {pe_list}
rerun FALSE
slots {slots}
tmpdir {directories}
shell /bin/sh
prolog NONE
epilog NONE
shell_start_mode unix_behavior
starter_method NONE
suspend_method NONE
resume_method NONE
terminate_method NONE
notify 00:00:30
owner_list NONE
user_lists NONE
xuser_lists NONE
subordinate_list NONE
complex_values NONE
projects NONE
xprojects NONE
calendar NONE
initial_state default
s_rt INFINITY
h_rt INFINITY
s_cpu INFINITY
h_cpu INFINITY
s_fsize INFINITY
h_fsize INFINITY
s_data INFINITY
h_data INFINITY
s_stack INFINITY
h_stack INFINITY
s_core INFINITY
h_core INFINITY
s_rss INFINITY
h_rss INFINITY
s_vmem INFINITY
h_vmem INFINITY
"""
