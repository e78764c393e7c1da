"""Two kernels of logits for Hopper (sm_90), in Gluon. Their tensor cores do not wait for the epilogue.

A program is one producer warp and two consumer warpgroups. The producer fetches operands through TMA into a ring of
buffers. The consumers own the upper and the lower 64 rows of a tile of 128 × 256 logits, and read the same 256 rows of
C. The second consumer runs half a ring behind the first. So the tensor cores work for one consumer while the other
computes exponentials of its 64 × 256 products. (In Triton's kernels both warpgroups reach the epilogue together.)

Units of work, epilogues, order of additions and results equal those of `exponentials_kernel` (logits.py) and
`gradient_kernel` (logit_gradient.py). Those kernels serve all other devices, operands and options. A filtered gradient
runs here only for its tail (TAIL).
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as hw
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..runtime.launch import Described, quick
from ..runtime.tiles import grouped
from .epilogues import exponentials_of, gradient_of, tail_of

HALF = gl.constexpr(64)  # rows of a consumer
# Triton 3.8 renames the copies of TMA, 3.9 leaves stubs at the older names.
if hasattr(tma, "async_load"):
    _copy_in, _copy_out = tma.async_load, tma.async_store
else:
    _copy_in, _copy_out = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global


@gluon.jit
def _unit(unit, work, BLOCK_V: gl.constexpr, GROUP: gl.constexpr):
    """First row, split, first column and end column of unit of work number `unit`."""
    N, V, _D, splits, tiles_per_split = work
    row_tile, split = grouped(unit, gl.cdiv(N, 2 * HALF), splits, GROUP)
    first = split * tiles_per_split * BLOCK_V
    return row_tile * (2 * HALF), split, first, gl.minimum(first + tiles_per_split * BLOCK_V, V)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The next buffer of the ring, and the phase parity of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    """The buffer before this one. (Triton would take a variable `previous = stage` for a constant.)"""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _produce(e_desc, gathered_desc, c_desc, some_ptr, ring, work, GROUP: gl.constexpr):
    """The producer: fetch the operands of every unit, in the order in which the consumers read them."""
    some = False
    if gathered_desc is not None:
        some = gl.load(some_ptr) != 0
    e_bufs, c_bufs, full, empty, _ahead = ring
    N, _V, D, splits, _tiles_per_split = work
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_V: gl.constexpr = c_bufs.shape[1]
    BLOCK_D: gl.constexpr = c_bufs.shape[2]
    BYTES: gl.constexpr = (2 * HALF + BLOCK_V) * BLOCK_D * 2
    stage, phase = 0, 1
    for unit in range(gl.program_id(0), gl.cdiv(N, 2 * HALF) * splits, gl.num_programs(0)):
        row, _split, first, end = _unit(unit, work, BLOCK_V, GROUP)
        for col in range(first, end, BLOCK_V):
            for d in range(0, D, BLOCK_D):
                mbarrier.wait(empty.index(stage), phase)
                arrived = full.index(stage)
                mbarrier.expect(arrived, BYTES)
                upper, lower = e_bufs.index(2 * stage), e_bufs.index(2 * stage + 1)
                _copy_in(e_desc, [row, d], arrived, upper, pred=not some)
                _copy_in(e_desc, [row + HALF, d], arrived, lower, pred=not some)
                if gathered_desc is not None:
                    _copy_in(gathered_desc, [row, d], arrived, upper, pred=some)
                    _copy_in(gathered_desc, [row + HALF, d], arrived, lower, pred=some)
                _copy_in(c_desc, [col, d], arrived, c_bufs.index(stage))
                stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _multiply(WHICH: gl.constexpr, acc, ring, stage, phase, depth):
    """This consumer's products (64 × 256) of one tile, and its place in the ring: the buffer and its phase parity."""
    e_bufs, c_bufs, full, empty, ahead = ring
    STAGES: gl.constexpr = full.shape[0]
    for step in range(depth):
        mbarrier.wait(full.index(stage), phase)
        e, c = e_bufs.index(2 * stage + WHICH), c_bufs.index(stage).permute((1, 0))
        acc = hw.warpgroup_mma(e, c, acc, use_acc=step > 0, is_async=True)
        acc = hw.warpgroup_mma_wait(1, deps=[acc])  # the previous step is done, so its buffers are free
        mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1, pred=step > 0)
        if WHICH == 0:
            mbarrier.arrive(ahead, count=1, pred=step == STAGES // 2)
        stage, phase = _next(stage, phase, STAGES)
    acc = hw.warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1)
    return acc, stage, phase


@gluon.jit
def _halves(acc, NARROW: gl.constexpr):
    """Left and right half of an accumulator, without moving data."""
    left, right = acc.reshape((acc.shape[0], 2, acc.shape[1] // 2)).permute((0, 2, 1)).split()
    return gl.convert_layout(left, NARROW, assert_trivial=True), gl.convert_layout(right, NARROW, assert_trivial=True)


@gluon.jit
def _store(desc, row, col, staging, value):
    """Store half a tile through shared memory."""
    tma.store_wait(0)  # until the previous store has read the staging buffer
    staging.store(value.to(desc.dtype))
    hw.fence_async_shared()
    _copy_out(desc, [row, col], staging)


@gluon.jit
def _ring(e_desc, c_desc, STAGES: gl.constexpr):
    """Allocate the ring: buffers for E and C, their barriers, and the barrier `ahead`.

    The first consumer arrives at `ahead` when it is half a ring into a tile; the second consumer then starts the tile.
    """
    BLOCK_V: gl.constexpr = c_desc.block_type.shape[0]
    BLOCK_D: gl.constexpr = c_desc.block_type.shape[1]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    e_bufs = gl.allocate_shared_memory(e_desc.dtype, [2 * STAGES, HALF, BLOCK_D], e_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [STAGES, BLOCK_V, BLOCK_D], c_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ahead = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(ahead, count=1)
    return e_bufs, c_bufs, full, empty, ahead


@quick
@gluon.jit(do_not_specialize=["N", "D", "splits", "tiles_per_split"])
def hopper_exponentials_kernel(
    e_desc, gathered_desc, c_desc, w_desc, columns_ptr, z_target_ptr, live_ptr, count_ptr, some_ptr, sum_ptr,
    metrics_ptr, unread_ptr, N, V, D, splits, tiles_per_split, logit_scale,
    STAGES: gl.constexpr, GROUP: gl.constexpr, EVEN_V: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Arguments as for `exponentials_kernel`, and some more.

    gathered_desc: the rows of e in the order of live_ptr, or None. some_ptr: () int32, given with gathered_desc: where
    not 0, gathered_desc is read in place of e_desc. unread_ptr: () int32 or None; where not 0, w is not written.
    """
    ring = _ring(e_desc, c_desc, STAGES)
    staging = ring[0]
    if w_desc is not None:
        staging = gl.allocate_shared_memory(w_desc.dtype, [2, HALF, c_desc.block_type.shape[0] // 2], w_desc.layout)
    count = N
    if live_ptr is not None:
        count = gl.load(count_ptr)
    work = (count, V, D, splits, tiles_per_split)
    pointers = (columns_ptr, z_target_ptr, live_ptr, sum_ptr, metrics_ptr, unread_ptr)
    gl.warp_specialize(
        [
            (_exponentials, (0, w_desc, staging, ring, work, pointers, N, logit_scale, GROUP, EVEN_V)),
            (_exponentials, (1, w_desc, staging, ring, work, pointers, N, logit_scale, GROUP, EVEN_V)),
            (_produce, (e_desc, gathered_desc, c_desc, some_ptr, ring, work, GROUP)),
        ],
        [4, 1],  # warps of the second consumer and of the producer; the first consumer has the program's own four
        [240, 24],  # registers a thread of the second consumer and of the producer
    )


@gluon.jit
def _exponentials(
    WHICH: gl.constexpr, w_desc, staging, ring, work, pointers, N, logit_scale, GROUP: gl.constexpr,
    EVEN_V: gl.constexpr,
):  # fmt: skip
    """A consumer of `hopper_exponentials_kernel`."""
    count, V, D, splits, _tiles_per_split = work
    columns_ptr, z_target_ptr, live_ptr, sum_ptr, metrics_ptr, unread_ptr = pointers
    wanted = True
    if unread_ptr is not None:
        wanted = gl.load(unread_ptr) == 0
    BLOCK_V: gl.constexpr = ring[1].shape[1]
    WIDTH: gl.constexpr = BLOCK_V // 2
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, NARROW)
    depth = gl.cdiv(D, ring[1].shape[2])
    stage, phase, turn = 0, 0, 0
    acc = gl.zeros((HALF, BLOCK_V), gl.float32, WIDE)
    for unit in range(gl.program_id(0), gl.cdiv(count, 2 * HALF) * splits, gl.num_programs(0)):
        row, split, first, end = _unit(unit, work, BLOCK_V, GROUP)
        row += WHICH * HALF
        rows = row + gl.arange(0, HALF, BY_ROW)
        of_rows = rows
        if live_ptr is not None:
            of_rows = gl.load(live_ptr + rows, mask=rows < N, other=0)
        column = rows
        if columns_ptr is not None:
            column = gl.load(columns_ptr + of_rows, mask=rows < N, other=-1).to(gl.int32)
        z_target = gl.load(z_target_ptr + of_rows, mask=rows < N, other=0.0)
        total = gl.zeros((HALF,), gl.float32, BY_ROW)
        highest = total
        wz_total = total
        for col in range(first, end, BLOCK_V):
            if WHICH == 1:
                mbarrier.wait(ring[4], turn)
                turn ^= 1
            acc, stage, phase = _multiply(WHICH, acc, ring, stage, phase, depth)
            halves = _halves(acc, NARROW)
            cols = col + gl.arange(0, WIDTH, gl.SliceLayout(0, NARROW))
            for part in gl.static_range(2):
                w, total, _z_total, highest, wz_total = exponentials_of(
                    halves[part], cols + part * WIDTH, column, z_target, None, V, logit_scale, 0.0, total, 0.0,
                    highest, wz_total, columns_ptr is not None, False, EVEN_V, False, False, metrics_ptr is not None,
                )  # fmt: skip
                if w_desc is not None:  # noqa: SIM102 (known to the compiler, unlike the next)
                    if wanted:
                        _store(w_desc, row, col + part * WIDTH, staging.index(WHICH), w)
        partial = split.to(gl.int64) * N + rows
        gl.store(sum_ptr + partial, total, mask=rows < N)
        if metrics_ptr is not None:
            gl.store(metrics_ptr + partial, highest, mask=rows < N)
            gl.store(metrics_ptr + splits.to(gl.int64) * N + partial, wz_total, mask=rows < N)
    if w_desc is not None:
        tma.store_wait(0)


@quick
@gluon.jit(do_not_specialize=["N", "W", "D", "first", "splits", "tiles_per_split"])
def hopper_gradient_kernel(
    e_desc, c_desc, dz_desc, columns_ptr, lse_ptr, a_ptr, b_ptr, active_ptr, eps_ptr, times_ptr,
    N, W, D, first, splits, tiles_per_split, logit_scale, on_target, elsewhere,
    STAGES: gl.constexpr, GROUP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Arguments as for `gradient_kernel`, without dbias. If eps_ptr is given, the tail is computed (TAIL)."""
    ring = _ring(e_desc, c_desc, STAGES)
    staging = gl.allocate_shared_memory(dz_desc.dtype, [2, HALF, c_desc.block_type.shape[0] // 2], dz_desc.layout)
    if active_ptr is not None:
        splits *= gl.load(active_ptr)
    work = (N, W, D, splits, tiles_per_split)
    rows = (columns_ptr, lse_ptr, a_ptr, b_ptr)
    tail = (eps_ptr, times_ptr)
    numbers = (first, logit_scale, on_target, elsewhere)
    gl.warp_specialize(
        [
            (_gradient, (0, dz_desc, staging, ring, work, rows, tail, numbers, GROUP)),
            (_gradient, (1, dz_desc, staging, ring, work, rows, tail, numbers, GROUP)),
            (_produce, (e_desc, None, c_desc, None, ring, work, GROUP)),
        ],
        [4, 1],  # warps of the second consumer and of the producer; the first consumer has the program's own four
        [240, 24],  # registers a thread of the second consumer and of the producer
    )


@gluon.jit
def _gradient(
    WHICH: gl.constexpr, dz_desc, staging, ring, work, pointers, tail, numbers, GROUP: gl.constexpr,
):  # fmt: skip
    """A consumer of `hopper_gradient_kernel`."""
    N, W, D, splits, _tiles_per_split = work
    columns_ptr, lse_ptr, a_ptr, b_ptr = pointers
    eps_ptr, times_ptr = tail
    eps = 0.0
    if eps_ptr is not None:
        eps = gl.load(eps_ptr)
    first, logit_scale, on_target, elsewhere = numbers
    BLOCK_V: gl.constexpr = ring[1].shape[1]
    WIDTH: gl.constexpr = BLOCK_V // 2
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    NARROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, NARROW)
    depth = gl.cdiv(D, ring[1].shape[2])
    stage, phase, turn = 0, 0, 0
    acc = gl.zeros((HALF, BLOCK_V), gl.float32, WIDE)
    for unit in range(gl.program_id(0), gl.cdiv(N, 2 * HALF) * splits, gl.num_programs(0)):
        row, _split, start, end = _unit(unit, work, BLOCK_V, GROUP)
        row += WHICH * HALF
        rows = row + gl.arange(0, HALF, BY_ROW)
        column = gl.load(columns_ptr + rows, mask=rows < N, other=-1).to(gl.int32) - first
        lse = gl.load(lse_ptr + rows, mask=rows < N, other=float("inf"))  # makes p = 0 beyond N
        a = gl.load(a_ptr + rows, mask=rows < N, other=0.0)
        b = gl.load(b_ptr + rows, mask=rows < N, other=0.0)
        for col in range(start, end, BLOCK_V):
            if WHICH == 1:
                mbarrier.wait(ring[4], turn)
                turn ^= 1
            acc, stage, phase = _multiply(WHICH, acc, ring, stage, phase, depth)
            halves = _halves(acc, NARROW)
            cols = col + gl.arange(0, WIDTH, gl.SliceLayout(0, NARROW))
            for part in gl.static_range(2):
                places = cols + part * WIDTH
                dz, p, is_target = gradient_of(
                    halves[part], places, column, lse, a, b, None, W, logit_scale, 0.0, on_target, elsewhere,
                    False, False,
                )  # fmt: skip
                if eps_ptr is not None:
                    dz = tail_of(dz, p, is_target, places, W, eps, times_ptr)
                _store(dz_desc, row, col + part * WIDTH, staging.index(WHICH), dz)
    tma.store_wait(0)


class Descriptor(Described, TensorDescriptor):
    """A TMA descriptor with the shared-memory layout that the tensor cores read. It follows from dtype and block."""

    def __init__(self, x: Tensor, rows: int, cols: int) -> None:
        self.describe(x, rows, cols)
        self.layout = _swizzled(min(128, cols * x.itemsize))


@lru_cache
def _swizzled(width: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=16, rank=2)
