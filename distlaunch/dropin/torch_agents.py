"""`rendezvous` with torch's own elastic agents, offered to a job that had them."""

import re

from distlaunch.dropin.job_text import Data, Offer
from distlaunch.plan.layout import is_loopback


def agents_offer(backend: str, endpoint: str, conf: str = "") -> tuple[Offer, ...]:
    """`rendezvous` with torch's own elastic agents, as far as a job file knows their backend."""
    known = {"c10d": "c10d", "etcd": "etcd-v2", "etcd-v2": "etcd-v2"}.get(backend)
    if not known:
        return ()
    place = _store(endpoint) if known == "c10d" else _etcd(endpoint)
    more = dict(re.findall(r"(?:^|,)\s*([A-Za-z_]\w*)\s*=\s*([^,]+?)\s*(?=,|$)", conf))
    more.pop("is_host", None)  # distlaunch sets it for each node
    value: dict[str, Data] = {"backend": known}
    value |= {key: part for key, part in (("endpoint", place), ("conf", more)) if part}
    return (Offer("for torch's own elastic agents instead:", "rendezvous", value),)


def _store(endpoint: str) -> str:
    """HOST:PORT of an agent's store, as far as it says something that holds elsewhere."""
    host, _, port = endpoint.rpartition(":")
    host = (host or endpoint).strip("[]")
    return "" if is_loopback(host) or port == "0" else endpoint


def _etcd(endpoint: str) -> str:
    """HOST:PORT of an etcd server; 2379 is its port for clients."""
    if not endpoint:
        return "ETCD_HOST:2379"
    return endpoint if re.search(r":[0-9]+$", endpoint) else f"{endpoint}:2379"
