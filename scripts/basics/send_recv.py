"""Point-to-point communication in a ring: send and recv one after the other, isend and irecv all at once."""

import torch
import torch.distributed as dist


def pass_token(rank: int, world_size: int) -> int:
    """Blocking: pass a token from rank to rank. Each rank adds its own number."""
    token = torch.tensor(0)
    if rank > 0:
        dist.recv(token, src=rank - 1)
    token += rank
    dist.send(token, dst=(rank + 1) % world_size)
    if rank == 0:
        dist.recv(token, src=world_size - 1)
    return int(token)


def shift(rank: int, world_size: int) -> int:
    """Non-blocking: every rank sends to its right and receives from its left neighbor at the same time."""
    mine, received = torch.tensor(rank), torch.tensor(-1)
    sending = dist.isend(mine, dst=(rank + 1) % world_size)
    receiving = dist.irecv(received, src=(rank - 1) % world_size)
    for request in (sending, receiving):
        request.wait()  # until then, don't write `mine` or read `received`
    return int(received)


def main() -> None:
    """Run both variants, and check the results."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size < 2:
        raise SystemExit("send_recv: a ring needs at least 2 ranks")

    total, left = pass_token(rank, world_size), shift(rank, world_size)

    if rank == 0 and total != sum(range(world_size)):
        raise SystemExit(f"send_recv: the token came back as {total}, not {sum(range(world_size))}")
    if left != (rank - 1) % world_size:
        raise SystemExit(f"send_recv: rank {rank} heard {left} from its left")
    print(f"rank {rank} of {world_size} heard from rank {left}")
    dist.barrier()
    if rank == 0:
        print(f"send_recv: ok, the token came back from {world_size} ranks as {total}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
