"""What variables and run-time settings do to the all_reduces of real processes, and what stats() tells."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.gradients import BITS, BUCKET_SIZE, DTYPES, digest, is_exact, noise, summed, within_bound
from tests.support.harness import Rank, run_ranks

pytestmark = pytest.mark.ranks


def switched_off_and_on(me: Rank) -> None:
    import torch_cgx

    assert not is_exact(summed(me), me.world)
    with torch_cgx.uncompressed():
        assert is_exact(summed(me), me.world)
        with torch_cgx.uncompressed():
            assert is_exact(summed(me), me.world)
        assert is_exact(summed(me), me.world)
        pending = noise(me.rank, 5000)
        work = dist.all_reduce(pending, async_op=True)
    assert work is not None
    work.wait()
    assert is_exact(pending, me.world)
    assert not is_exact(summed(me), me.world)
    with pytest.raises(KeyError), torch_cgx.uncompressed():
        raise KeyError
    assert not is_exact(summed(me), me.world)


def test_uncompressed_makes_the_all_reduces_inside_exact() -> None:
    run_ranks(switched_off_and_on, 2, "cgx", env={BITS: "4"})


def gradients_of_ddp(me: Rank) -> Tensor:
    from torch.nn.parallel import DistributedDataParallel

    import torch_cgx

    torch.manual_seed(0)
    net = DistributedDataParallel(torch.nn.Linear(100, 100, bias=False))
    with torch_cgx.uncompressed():
        # Autograd's own threads issue these.
        net(noise(me.rank, 100)).sum().backward()
    gradient = net.module.weight.grad
    assert isinstance(gradient, Tensor)
    expected = (noise(0, 100) + noise(1, 100)).expand(100, 100) / 2
    torch.testing.assert_close(gradient, expected)
    return gradient


def test_uncompressed_holds_for_what_autograd_issues_meanwhile() -> None:
    run_ranks(gradients_of_ddp, 2, "cgx", env={BITS: "2"})


def set_at_run_time(me: Rank) -> None:
    import torch_cgx

    assert is_exact(summed(me), me.world)
    torch_cgx.set_default(bits=4)
    coarse = summed(me)
    assert not is_exact(coarse, me.world)
    within_bound(coarse, me.world, 4)
    torch_cgx.set_default(bits=8, bucket_size=64)
    fine = summed(me)
    within_bound(fine, me.world, 8, block=64)
    assert not is_exact(fine, me.world)
    torch_cgx.set_default(bits=32)
    assert is_exact(summed(me), me.world)
    for wrong in ({"bits": 9}, {"bits": 0}, {"bits": 4, "bucket_size": 0}):
        with pytest.raises(ValueError):
            torch_cgx.set_default(**wrong)
    assert is_exact(summed(me), me.world)


def test_set_default_changes_the_setting_at_run_time() -> None:
    run_ranks(set_at_run_time, 2, "cgx")


def variables_are_read_at_every_call(me: Rank) -> None:
    for bits in ("32", "8", "2", "32"):
        os.environ[BITS] = bits
        assert is_exact(summed(me), me.world) == (bits == "32")
    os.environ[BITS] = "8"
    for block in ("32", "1024", "100"):
        os.environ[BUCKET_SIZE] = block
        within_bound(summed(me), me.world, 8, block=int(block))
    os.environ[BITS] = "9"
    with pytest.raises(ValueError, match=BITS):
        summed(me)


def test_bits_and_bucket_size_are_read_at_every_call() -> None:
    run_ranks(variables_are_read_at_every_call, 2, "cgx")


def larger_than_the_fusion_buffer(me: Rank, bits: int) -> list[str]:
    digests = []
    for numel in (262_143, 262_144, 262_145, 300_007, 1_000_003):
        x = summed(me, numel)
        if bits == 32:
            assert is_exact(x, me.world), numel
        elif me.rank == 0:
            within_bound(x, me.world, bits)
        digests.append(digest(x))
    return digests


@pytest.mark.parametrize("bits", [4, 32])
def test_tensors_larger_than_the_fusion_buffer_are_right(bits: int) -> None:
    env = {BITS: str(bits), "CGX_FUSION_BUFFER_SIZE_MB": "1"}
    first, *others = run_ranks(larger_than_the_fusion_buffer, 3, "cgx", bits, env=env)
    assert all(other == first for other in others)


def around_the_minimal_size(me: Rank) -> None:
    assert is_exact(summed(me, 999), me.world)
    assert not is_exact(summed(me, 1000), me.world)


def test_tensors_below_the_minimal_size_stay_exact() -> None:
    run_ranks(around_the_minimal_size, 2, "cgx", env={BITS: "4", "CGX_COMPRESSION_MINIMAL_SIZE": "1000"})


def incomplete_blocks(me: Rank) -> None:
    for dtype in DTYPES:
        for numel in (600, 5 * 512 + 100, 100):
            x = noise(me.rank, numel, dtype)
            dist.all_reduce(x)
            whole = numel - numel % 512
            both = noise(0, numel, dtype).float() + noise(1, numel, dtype).float()
            assert torch.equal(x[whole:], both.to(dtype)[whole:])
            assert whole == 0 or not torch.equal(x[:whole], both.to(dtype)[:whole])


def test_an_incomplete_block_travels_raw_where_asked() -> None:
    run_ranks(incomplete_blocks, 2, "cgx", env={BITS: "4", "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS": "1"})


def counted(me: Rank) -> None:
    import torch_cgx

    torch_cgx.reset_stats()
    for _ in range(3):
        summed(me, 100_000)
    stats = torch_cgx.stats()
    assert stats["operations"] == 3
    assert stats["compressed_operations"] == 3
    assert stats["bytes_before"] == 3 * 400_000
    # 4 bits and an eighth of a bit for each value's share of its block's header.
    assert 7.5 < stats["bytes_before"] / stats["bytes_after"] < 7.76
    assert 0 < stats["bytes_sent"] < stats["bytes_before"] / 3
    for phase in ("encode_s", "wait_s", "reduce_s", "decode_s"):
        assert 0.0 <= stats[phase] < 20.0
    assert stats["encode_s"] > 0 and stats["reduce_s"] > 0 and stats["decode_s"] > 0
    with torch_cgx.uncompressed():
        summed(me)
    summed(me, 10)
    stats = torch_cgx.stats()
    assert stats["operations"] == 5
    assert stats["compressed_operations"] == 3
    group = dist.new_group()
    summed(me, group=group)
    assert torch_cgx.stats(group)["compressed_operations"] == 1
    assert torch_cgx.stats()["compressed_operations"] == 3
    torch_cgx.reset_stats()
    assert torch_cgx.stats()["operations"] == 0


def test_stats_show_what_was_compressed() -> None:
    run_ranks(counted, 2, "cgx", env={BITS: "4"})


def with_registered_layers(me: Rank) -> str:
    import torch_cgx

    torch_cgx.register_layer(0, 0, 1000, 32, 512)
    torch_cgx.register_layer(0, 1, 3000, 8, 128)
    torch_cgx.register_layer(0, 2, 1000, 2, 512)
    both = noise(0, 5000) + noise(1, 5000)
    x = summed(me)
    assert torch.equal(x[:1000], both[:1000])
    errors = [(x - both)[a:b].abs().max().item() for a, b in ((1000, 4000), (4000, 5000))]
    assert 0 < errors[0] < 0.1 < errors[1]

    torch_cgx.set_quantization_bits(0, 2, 8)
    torch_cgx.set_quantization_bucket_size(0, 2, 64)
    y = summed(me)
    assert torch.equal(y[:1000], both[:1000])
    assert 0 < (y - both)[4000:].abs().max().item() < 0.1
    # A tensor that is not the registered layers' follows the default.
    within_bound(summed(me, 4999), me.world, 6)
    with torch_cgx.uncompressed():
        assert is_exact(summed(me), me.world)
    return digest(y)


def test_registered_layers_have_bits_of_their_own() -> None:
    first, second = run_ranks(with_registered_layers, 2, "cgx", env={BITS: "6"})
    assert first == second
