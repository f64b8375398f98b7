"""The laws of layouts: everything is covered once, cuts lie where they may, shares are even."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_cgx.codecs import RAW, Codec, MaxMin
from torch_cgx.plan.layout import Chunk, Layer, Layout, Piece, make_layout, make_shares_layout

quantizers = st.one_of(
    st.just(RAW),
    st.builds(MaxMin, st.integers(1, 8), st.sampled_from([1, 3, 8, 20, 64, 512]), st.booleans()),
)
layers_lists = st.lists(st.builds(Layer, st.integers(0, 3000), quantizers), max_size=8)
worlds = st.integers(1, 9)
itemsizes = st.sampled_from([2, 4, 8])
slice_sizes = st.sampled_from([1, 64, 1000, 4096, 1 << 20])


def pieces(layout: Layout) -> list[Piece]:
    return [piece for part in layout.slices for chunk in part.chunks for piece in chunk.pieces]


def starts(layers: list[Layer]) -> list[int]:
    return [sum(layer.numel for layer in layers[:i]) for i in range(len(layers))]


def layer_of(piece: Piece, layers: list[Layer]) -> tuple[int, Layer]:
    """The layer that a piece lies in, and where that starts."""
    (found,) = [
        (start, layer)
        for start, layer in zip(starts(layers), layers, strict=True)
        if start <= piece.offset and piece.offset + piece.numel <= start + layer.numel
    ]
    return found


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_pieces_cover_every_value_once_and_in_order(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    position = 0
    for piece in pieces(make_layout(layers, world, itemsize, slice_nbytes)):
        assert piece.offset == position and piece.numel > 0
        position += piece.numel
    assert position == sum(layer.numel for layer in layers)


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_cuts_lie_at_layers_ends_or_multiples_of_the_cut_unit(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    for piece in pieces(make_layout(layers, world, itemsize, slice_nbytes)):
        start, layer = layer_of(piece, layers)
        assert (piece.offset - start) % layer.codec.cut_numel == 0


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_pieces_carry_their_layer_s_quantizer(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    for piece in pieces(make_layout(layers, world, itemsize, slice_nbytes)):
        _, layer = layer_of(piece, layers)
        assert (piece.bits, piece.block) == (layer.codec.bits, layer.codec.block)
        assert piece.raw_tail == layer.codec.raw_tail(piece.numel)


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_payloads_fill_their_slot_without_gap_or_overlap(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    for part in make_layout(layers, world, itemsize, slice_nbytes).slices:
        assert len(part.chunks) == world
        assert part.nbytes == sum(chunk.nbytes for chunk in part.chunks) > 0
        for chunk in part.chunks:
            end = 0
            for piece in chunk.pieces:
                assert piece.payload == end and end % 8 == 0
                end += layer_of(piece, layers)[1].codec.payload_nbytes(piece.numel, itemsize)
            assert chunk.nbytes == end and (end > 0) == bool(chunk.pieces)


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_a_slice_is_within_its_limit_or_one_cut_unit(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    for part in make_layout(layers, world, itemsize, slice_nbytes).slices:
        inside = [piece for chunk in part.chunks for piece in chunk.pieces]
        numel = sum(piece.numel for piece in inside)
        if numel * itemsize > slice_nbytes:
            assert len(inside) == 1 and numel <= layer_of(inside[0], layers)[1].codec.cut_numel


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_slices_are_as_full_as_the_cuts_allow(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    """The next slice's first cut unit would not have fitted."""
    slices = make_layout(layers, world, itemsize, slice_nbytes).slices
    for part, following in pairwise(slices):
        numel = sum(piece.numel for chunk in part.chunks for piece in chunk.pieces)
        first = next(piece for chunk in following.chunks for piece in chunk.pieces)
        start, layer = layer_of(first, layers)
        unit = min(layer.codec.cut_numel, start + layer.numel - first.offset)
        assert (numel + unit) * itemsize > slice_nbytes


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_chunks_are_balanced_to_a_cut_unit_at_either_end(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    for part in make_layout(layers, world, itemsize, slice_nbytes).slices:
        inside = [piece for chunk in part.chunks for piece in chunk.pieces]
        units = [layer_of(piece, layers)[1].codec for piece in inside]
        # A unit with a raw tail may be longer than a whole one.
        unit_nbytes = max(q.payload_nbytes(q.cut_numel - i, itemsize) for q in units for i in (0, 1))
        for chunk in part.chunks:
            # Every boundary is the nearest of two cuts, so off by half a unit; padding adds 8 bytes a piece.
            slack = unit_nbytes + 8 * (len(chunk.pieces) + 2) + 8 * world
            assert abs(chunk.nbytes - part.nbytes / world) <= slack


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
@pytest.mark.parametrize("world", [2, 3, 4, 7, 12])
def test_mixed_layers_are_balanced_by_wire_bytes_not_by_values(world: int, bits: int) -> None:
    layers = [Layer(1 << 20, MaxMin(bits, 512)), Layer(1 << 20, RAW)]
    (part,) = make_layout(layers, world, 4, 1 << 30).slices
    sizes = [chunk.nbytes for chunk in part.chunks]
    assert max(sizes) - min(sizes) <= 2 * MaxMin(bits, 512).payload_nbytes(512, 4)


def test_five_billion_values_are_laid_out_within_a_second() -> None:
    numel = 5_000_000_000
    start = time.process_time()
    layout = make_layout([Layer(numel, MaxMin(4, 1024)), Layer(0, RAW)], 8, 4, 64 << 20)
    elapsed_s = time.process_time() - start
    last = pieces(layout)[-1]
    assert last.offset + last.numel == numel
    assert len(layout.slices) == -(-numel * 4 // (64 << 20))
    assert elapsed_s < 1.0


@given(layers=layers_lists, world=worlds)
def test_equal_arguments_share_one_layout(layers: list[Layer], world: int) -> None:
    copies = [Layer(layer.numel, layer.codec) for layer in layers]
    assert make_layout(layers, world, 4, 1000) is make_layout(tuple(copies), world, 4, 1000)


def test_no_values_make_no_slices() -> None:
    assert make_layout([], 4, 4, 1000) == make_layout([Layer(0, RAW)], 4, 4, 1000) == Layout(())


def test_ranks_beyond_the_cut_units_get_empty_chunks() -> None:
    (part,) = make_layout([Layer(100, MaxMin(4, 512))], 5, 4, 1000).slices
    assert [chunk for chunk in part.chunks if not chunk.pieces] == [Chunk((), 0, 4)] * 4


@given(layers=layers_lists, n_chunks=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_an_exact_chunk_is_the_same_values_raw(
    layers: list[Layer], n_chunks: int, itemsize: int, slice_nbytes: int
) -> None:
    for part in make_layout(layers, n_chunks, itemsize, slice_nbytes).slices:
        for chunk in part.chunks:
            exact = chunk.coded(exact=True)
            assert chunk.coded(exact=False) is chunk and chunk.coded(exact=True) is exact
            numel = sum(piece.numel for piece in chunk.pieces)
            assert exact.nbytes == RAW.payload_nbytes(numel, itemsize)
            if not chunk.pieces:
                assert exact == chunk
                continue
            (raw,) = exact.pieces
            assert (raw.offset, raw.numel, raw.raw_tail, raw.bits) == (chunk.pieces[0].offset, numel, numel, 32)
            assert raw.payload == 0 and exact.nbytes % 8 == 0


@given(quantizer=quantizers, numel=st.integers(0, 10_000), itemsize=itemsizes)
def test_payload_lengths_are_whole_words_and_grow_linearly_in_eight_cut_units(
    quantizer: Codec, numel: int, itemsize: int
) -> None:
    step = 8 * quantizer.cut_numel
    whole = numel // step * step
    assert quantizer.payload_nbytes(numel, itemsize) % 8 == 0
    per_step = quantizer.payload_nbytes(step, itemsize)
    assert quantizer.payload_nbytes(whole, itemsize) == whole // step * per_step
    assert quantizer.payload_nbytes(numel, itemsize) >= quantizer.payload_nbytes(whole, itemsize)


@pytest.mark.parametrize(("bits", "block"), [(0, 8), (9, 8), (32, 8), (4, 0), (4, 65537)])
def test_a_quantizer_outside_its_range_is_refused(bits: int, block: int) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got"):
        MaxMin(bits, block)


@pytest.mark.parametrize(
    ("numel", "world", "itemsize", "slice_nbytes"),
    [(-1, 1, 4, 64), (8, 0, 4, 64), (8, 1, 0, 64), (8, 1, 4, 0)],
)
def test_impossible_arguments_are_refused(numel: int, world: int, itemsize: int, slice_nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got"):
        make_layout([Layer(numel, RAW)], world, itemsize, slice_nbytes)


# ---- tensors of one share a rank ----


def share_numel(layers: list[Layer]) -> int:
    return sum(layer.numel for layer in layers)


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_chunk_c_of_every_slice_lies_in_share_c_and_all_cover_every_value_once(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    layout, numel = make_shares_layout(layers, world, itemsize, slice_nbytes), share_numel(layers)
    ends = [rank * numel for rank in range(world)]
    for part in layout.slices:
        assert len(part.chunks) == world
        for rank, chunk in enumerate(part.chunks):
            assert chunk.share == rank * numel and chunk.itemsize == itemsize
            for piece in chunk.pieces:
                assert piece.offset == ends[rank] and piece.numel > 0
                ends[rank] += piece.numel
    assert ends == [(rank + 1) * numel for rank in range(world)]


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_the_chunks_of_a_slice_are_the_same_in_every_share(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    """Each as the first share has it, which begins with the tensor; so payloads of all ranks are as long."""
    for part in make_shares_layout(layers, world, itemsize, slice_nbytes).slices:
        first = part.chunks[0]
        assert first.nbytes > 0 and first.in_share == first.pieces
        for chunk in part.chunks[1:]:
            assert chunk.in_share == first.pieces and chunk.nbytes == first.nbytes
            assert chunk.coded(exact=True).in_share == first.coded(exact=True).pieces


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_pieces_of_a_share_are_cut_and_coded_as_its_layers_allow(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    for part in make_shares_layout(layers, world, itemsize, slice_nbytes).slices:
        end = 0
        for piece in part.chunks[-1].in_share:
            start, layer = layer_of(piece, layers)
            quantizer = layer.codec
            assert (piece.offset - start) % quantizer.cut_numel == 0
            assert (piece.bits, piece.block) == (quantizer.bits, quantizer.block)
            assert piece.raw_tail == quantizer.raw_tail(piece.numel)
            assert piece.payload == end and end % 8 == 0
            end += quantizer.payload_nbytes(piece.numel, itemsize)
        assert part.chunks[-1].nbytes == end


@given(layers=layers_lists, world=worlds, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_a_slice_of_all_shares_is_within_its_limit_or_one_cut_unit_of_each_and_full(
    layers: list[Layer], world: int, itemsize: int, slice_nbytes: int
) -> None:
    slices = make_shares_layout(layers, world, itemsize, slice_nbytes).slices
    for part in slices:
        inside = [piece for chunk in part.chunks for piece in chunk.pieces]
        if sum(piece.numel for piece in inside) * itemsize > slice_nbytes:
            (piece,) = part.chunks[0].pieces
            assert len(inside) == world and piece.numel <= layer_of(piece, layers)[1].codec.cut_numel
    for part, following in pairwise(slices):
        numel = sum(piece.numel for piece in part.chunks[0].pieces)
        first = following.chunks[0].pieces[0]
        start, layer = layer_of(first, layers)
        unit = min(layer.codec.cut_numel, start + layer.numel - first.offset)
        assert (numel + unit) * world * itemsize > slice_nbytes


@given(layers=layers_lists, itemsize=itemsizes, slice_nbytes=slice_sizes)
def test_the_only_share_is_laid_out_as_a_tensor_of_one_chunk(
    layers: list[Layer], itemsize: int, slice_nbytes: int
) -> None:
    assert make_shares_layout(layers, 1, itemsize, slice_nbytes) == make_layout(layers, 1, itemsize, slice_nbytes)


@given(layers=layers_lists, world=worlds)
def test_equal_arguments_share_one_layout_of_shares(layers: list[Layer], world: int) -> None:
    copies = [Layer(layer.numel, layer.codec) for layer in layers]
    assert make_shares_layout(layers, world, 4, 1000) is make_shares_layout(tuple(copies), world, 4, 1000)


@pytest.mark.parametrize("slice_nbytes", [64 << 20, 2**40])
@pytest.mark.parametrize("quantizer", [MaxMin(4, 1024), MaxMin(1, 65536), RAW])
def test_shares_of_five_billion_values_in_all_are_covered_by_payloads_of_the_right_length(
    quantizer: Codec, slice_nbytes: int
) -> None:
    world, numel = 5, 1_000_000_007
    layout = make_shares_layout([Layer(numel, quantizer), Layer(0, RAW)], world, 4, slice_nbytes)
    end = 0
    for part in layout.slices:
        (piece,) = part.chunks[-1].pieces
        (own,) = part.chunks[-1].in_share
        assert own.offset == end and piece.offset == (world - 1) * numel + end
        end += piece.numel
        assert part.chunks[-1].nbytes == quantizer.payload_nbytes(piece.numel, 4)
    assert end == numel
    whole = -(-numel * world * 4 // slice_nbytes)
    assert whole <= len(layout.slices) <= whole * 1.1  # what a slice leaves free is less than a cut unit a share
    assert slice_nbytes < 2**40 or len(layout.slices) == 1


def test_no_values_make_no_slices_of_shares_either() -> None:
    nothing = [Layer(0, RAW), Layer(0, MaxMin(4, 64))]
    assert make_shares_layout([], 4, 4, 1000) == make_shares_layout(nothing, 4, 4, 1000) == Layout(())


@pytest.mark.parametrize(
    ("numel", "world", "itemsize", "slice_nbytes"),
    [(-1, 1, 4, 64), (8, 0, 4, 64), (8, 1, 0, 64), (8, 1, 4, 0)],
)
def test_impossible_shares_are_refused(numel: int, world: int, itemsize: int, slice_nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"expected .*, got"):
        make_shares_layout([Layer(numel, RAW)], world, itemsize, slice_nbytes)
