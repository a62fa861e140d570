"""Advice on the key of the job file to check when a worker can't be started."""

import errno

from distlaunch.job.spec import JobSpec


def unstarted_advice(spec: JobSpec, node: int, stage: str, code: int) -> str:
    """Return an addition to the error of the agent for a worker of the pool node `node`.

    `stage` and `code` are the stage and errno of `distlaunch.agent.messages.WorkerUnstarted`.
    """
    if not spec.places:  # no job file: the command line of torchrun
        return ""
    if stage == "workdir":
        return f" ({_workdir_key(spec, node)})"
    program = spec.program_of(spec.pool[node])
    kind, word = program.kind, program.words[0]
    looked_for = stage == "script" or (stage == "exec" and kind == "command")
    if code != errno.ENOENT or not looked_for or not program.placed:
        return ""
    if word.startswith(("/", "~")):
        return f" (set by {kind if spec.pool[node].script is None else f'{spec.pool[node].path}.script'})"
    return f"; a relative {kind} is looked for in the node's workdir ({_workdir_key(spec, node)})"


def _workdir_key(spec: JobSpec, node: int) -> str:
    if spec.pool[node].workdir is not None:
        return f"set by {spec.pool[node].path}.workdir"
    file = spec.invocation.file
    default = "the job file's directory" if file else "the current directory, since the job is in no file"
    return "set by workdir" if "workdir" in spec.places else f"by default {default}"
