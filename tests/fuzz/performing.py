"""Perform a plan of torch.distributed calls on one rank, and say what came of each.

Printed scripts contain this file as it is, so it needs nothing but torch. A plan is a list of steps. A step is a list
of one or two threads, each a list of calls, and each call a dict with its team, its source, and how it is waited for.
"""

import math
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def given(rank, shape, dtype, layout="contiguous", scale=1):  # type: ignore[no-untyped-def]
    """Return a rank's input: small whole numbers, so that sums and products are exact in every dtype."""
    numbers = (torch.arange(math.prod(shape)) * 3 + rank * 5) % 4 + 1
    if dtype == torch.bool:
        x = numbers % 2 == 0
    elif dtype.is_complex:
        x = torch.complex(numbers.double(), numbers.double() + 1).to(dtype) * scale
    else:
        x = numbers.to(dtype) * scale
    x = x.reshape(shape)
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "offset":
        return torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[x.numel() > 0 :].view(shape)
    if layout == "gaps":
        return torch.stack([x, x], -1)[..., 0]
    if layout in ("expanded", "repeated") and x.dim() and x.numel():
        return x[:1].expand(shape) if layout == "expanded" else x[:1].expand(shape).contiguous()
    return x


def blank(shape, dtype, layout="contiguous"):  # type: ignore[no-untyped-def]
    """Return an output whose values show whether it has been written."""
    return given(0, shape, dtype, layout).fill_(9)


class Performance:
    """One rank's way through a plan, on the groups of one backend."""

    def __init__(self, teams, groups, me, note=lambda text: None):  # type: ignore[no-untyped-def]
        self.teams, self.groups, self.me, self.note = teams, groups, me, note
        self.outcomes = {}  # by (step, thread, number): ("values", ...) or ("refused" or "lost", error)

    def perform(self, plan):  # type: ignore[no-untyped-def]
        pending = []
        for number, step in enumerate(plan):
            self._wait(pending, number)
            if len(step) == 1:
                self._run(step[0], number, 0, pending)
                continue
            threads = [threading.Thread(target=self._run, args=(step[i], number, i)) for i in range(len(step))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self._wait(pending, math.inf)
        return self.outcomes

    def _run(self, calls, step, thread, pending=None):  # type: ignore[no-untyped-def]
        alone = []  # a thread of two waits for its own calls
        for number, call in enumerate(calls):
            members = self.teams[call["team"]]
            if self.me not in members or self.is_lost():
                continue
            key = (step, thread, number)
            self.note(f"{key} {call['source']!r}")
            rank = members.index(self.me)
            names = {"rank": rank, "size": len(members), "members": members, "group": self.groups[call["team"]]}
            names |= {"torch": torch, "dist": dist, "funcol": funcol, "given": given, "blank": blank}
            names |= {"work": None, "out": [], "kept": []}
            if call["late"] == rank:
                time.sleep(0.003)
            try:
                exec(call["source"], names)
            except Exception as error:
                self.outcomes[key] = judge(error)
                continue
            if call["way"] == "sync":
                self._finish(key, call, names)
            else:
                (alone if pending is None else pending).append((step + call["after"], key, call, names))
        self._wait(alone, math.inf)

    def is_lost(self):  # type: ignore[no-untyped-def]
        """Whether an error has cost a group, so that further calls would only wait."""
        return any(outcome[0] == "lost" for outcome in self.outcomes.copy().values())

    def _wait(self, pending, step):  # type: ignore[no-untyped-def]
        """Wait for the calls whose time has come, the youngest first."""
        for entry in [entry for entry in reversed(pending) if entry[0] < step]:
            pending.remove(entry)
            self._finish(*entry[1:])

    def _finish(self, key, call, names):  # type: ignore[no-untyped-def]
        self.note(f"{key} is waited for")
        work = names["work"]
        try:
            for handle in work if isinstance(work, list) else [] if work is None else [work]:
                future = future_of(handle) if call["way"] == "future" else None
                handle.wait() if future is None else future.wait()
            self.outcomes[key] = ("values", copied(names["out"]), copied(names["kept"]))
        except Exception as error:
            self.outcomes[key] = judge(error)


def future_of(handle):  # type: ignore[no-untyped-def]
    """Return a handle's future, or None: not all of gloo's handles have one."""
    try:
        return handle.get_future()
    except (AttributeError, RuntimeError):
        return None


def judge(error):  # type: ignore[no-untyped-def]
    """Return whether a call was refused, or has cost the group."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    words = ("imed out", "closed by peer", "onnection reset", "MismatchError", "PoisonedError", "PeerLostError")
    lost = "CGXError" in kinds or any(word in str(error) for word in words)
    return ("lost" if lost else "refused", f"{kinds[0]}: {error}")


def copied(value):  # type: ignore[no-untyped-def]
    if isinstance(value, torch.Tensor):
        if isinstance(value, funcol.AsyncCollectiveTensor):
            value = value.wait()
        return value.detach().to_dense().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list | tuple) else value


def same(ours, theirs, share=1, tolerance=0.0):  # type: ignore[no-untyped-def]
    """Whether two results are equal, after theirs, a sum, has been divided by `share`."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor) or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return False
        if share != 1:
            theirs = (theirs / share).to(theirs.dtype)
            kind = theirs.dtype if theirs.is_floating_point() or theirs.is_complex() else torch.float64
            tolerance = 2 * torch.finfo(kind).eps
        if tolerance and theirs.numel():
            wide = (lambda t: t.cdouble()) if theirs.is_complex() else (lambda t: t.double())
            limit = tolerance * wide(theirs).abs().max() + (1e-6 if share == 1 else 0)
            close = (wide(ours) - wide(theirs)).abs() <= limit
            return bool((close | (ours == theirs) | (ours.isnan() & theirs.isnan())).all())
        return torch.equal(bits(ours), bits(theirs))
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key], share) for key in theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(same(a, b, share) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def bits(tensor):  # type: ignore[no-untyped-def]
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0)
