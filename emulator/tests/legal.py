"""Instructions that ptxas 13.0 accepts, one for each form of operands."""

LEGAL = """
add.u32 %r1, %r2, 5; sub.f32 %f1, %f2, 0f3F800000; add.sat.f32 %f1, %f2, %f3
add.rn.f32.bf16 %f1, %h1, %f2; mul.lo.s32 %r1, %r2, -1; mul.wide.u16 %r1, %h1, %h2
mul.wide.u32 %rd1, %r1, %r2; mul.rn.f64 %fd1, %fd2, %fd3; mad.lo.u32 %r1, %r2, %r3, %r4
mad.wide.s32 %rd1, %r1, %r2, %rd2; fma.rn.f32 %f1, %f2, %f3, %f4
fma.rn.relu.bf16 %h1, %h2, %h3, %h4; fma.rm.f32 %f1, %f2, %f3, %f4
fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4; div.u32 %r1, %r2, %r3
div.rn.f32 %f1, %f2, %f3; rem.s64 %rd1, %rd2, %rd3; min.relu.s32 %r1, %r2, %r3
max.NaN.f32 %f1, %f2, %f3; min.bf16x2 %r1, %r2, %r3; neg.s16 %h1, %h2; abs.ftz.f32 %f1, %f2
and.b32 %r1, %r2, %r3; or.pred %p1, %p2, !%p3; not.b64 %rd1, %rd2; shl.b64 %rd1, %rd2, %r1
shr.s16 %h1, %h2, %r1; shf.l.wrap.b32 %r1, %r2, %r3, %r4; popc.b64 %r1, %rd1; brev.b32 %r1, %r2
bfind.shiftamt.u32 %r1, %r2; bfe.s32 %r1, %r2, %r3, %r4; bfi.b64 %rd1, %rd2, %rd3, %r1, %r2
prmt.b32 %r1, %r2, %r3, 0x7710; lop3.b32 %r1, %r2, %r3, %r4, 0x96; selp.f32 %f1, %f2, %f3, %p1
copysign.f32 %f1, %f2, %f3; setp.lt.s32 %p1|%p2, %r1, %r2; setp.hi.u64 %p1, %rd1, %rd2
setp.eq.and.b16 %p1, %h1, %h2, !%p2; setp.ltu.f32 _|%p1, %f1, %f2; setp.nan.bf16 %p1, %h1, %h2
set.lt.u32.f32 %r1, %f1, %f2; sqrt.rn.f64 %fd1, %fd2; ex2.approx.ftz.f32 %f1, %f2
mov.pred %p1, !%p2; mov.u32 %r1, %tid.x; mov.u64 %rd1, %clock64; mov.b32 %r1, {%h1, %h2}
mov.b64 {%f1, _}, %rd1; mov.b128 %q1, {%rd1, %rd2}; mov.b32 %r1, WARP_SZ
cvt.sat.u8.s32 %r1, %r2; cvt.rn.f32.s32 %f1, %r1; cvt.rzi.s32.f32 %r1, %f1; cvt.f32.bf16 %f1, %h1
cvt.rn.satfinite.e4m3x2.f32 %h1, %f1, %f2; cvt.rn.f16x2.e4m3x2 %r1, %h1; cvt.rna.tf32.f32 %r1, %f1
cvt.rp.ue8m0x2.f32 %h1, %f1, %f2; ld.global.u32 %r1, [%rd1+4]; ld.acquire.gpu.global.s8 %r1, [%rd1]
ld.global.nc.L1::no_allocate.v4.f32 {%f1, %f2, _, %f3}, [%rd1]; ld.shared.b128 %q1, [%r1]
ld.global.L2::cache_hint.b16 %r1, [%rd1], %rd2; st.shared.v2.b32 [%r1], {0, %r2}
st.release.cta.global.u64 [%rd1], 7; st.async.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3]
atom.global.add.u32 _, [%rd1], 1; atom.shared.cas.b64 %rd1, [%r1], %rd2, %rd3
atom.global.add.v2.f32 {%f1, %f2}, [%rd1], {%f3, %f4}; atom.global.exch.b32 %r1, [%rd1], %r2
red.release.gpu.global.max.s32 [%rd1], %r1; cvta.to.shared.u64 %rd1, %rd2
isspacep.global %p1, %rd1; mapa.shared::cluster.u32 %r1, %r2, %r3; getctarank.u64 %r1, %rd1
prefetch.global.L2 [%rd1]; createpolicy.fractional.L2::evict_first.b64 %rd1, 1.0
ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r1, %r2}, [%r3]
stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r2}; elect.sync _|%p1, -1
shfl.sync.idx.b32 %r1|%p1, %r2, %r3, 31, -1; vote.sync.ballot.b32 %r1, !%p1, -1
vote.sync.any.pred %p1, %p2, -1; match.any.sync.b64 %r1, %rd1, -1; redux.sync.min.s32 %r1, %r2, -1
activemask.b32 %r1; bar.sync 0; barrier.sync.aligned 1, 64; bar.arrive 1, 64
bar.red.popc.u32 %r1, 0, %p1; bar.red.and.pred %p1, 0, 64, !%p2; bar.warp.sync -1
barrier.cluster.arrive.relaxed; mbarrier.init.shared.b64 [%r1], 1
mbarrier.arrive.shared.b64 _, [%r1]; mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%r1], %r2
mbarrier.complete_tx.shared.b64 [%r1], 16; mbarrier.test_wait.shared.b64 %p1, [%r1], %rd1
mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p1, [%r1], 0, 1000; fence.acq_rel.gpu
fence.proxy.async.shared::cta; fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128
griddepcontrol.wait; setmaxnreg.inc.sync.aligned.u32 240; nanosleep.u32 %r1
clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [%r1], [%r2]
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q1
clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r1, %r2, %r3, _}, %q1
cp.async.ca.shared.global [%r1], [%rd1], 16; cp.async.cg.shared.global [%r1], [%rd1], 16, %r2
cp.async.wait_group 1; cp.async.mbarrier.arrive.noinc.shared.b64 [%r1]
cp.async.bulk.prefetch.L2.global [%rd1], 64
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 64, [%r2]
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint
[%r1], [%rd1], 64, [%r2], %h1, %rd2
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], %r2
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], 64
cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2
[%r1], [%rd1, {%r2, 0, %r3}], [%r4]
cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes
[%r1], [%rd1, {%r2, %r3, %r4, %r5, %r6}], [%r7]
cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2]
tensormap.replace.tile.global_stride.global.b1024.b64 [%rd1], 0, %rd2
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
[%rd1], [%r1], 128
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32; tcgen05.wait::ld.sync.aligned
tcgen05.cp.cta_group::1.128x256b [%r1], %rd1
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1
tcgen05.ld.sync.aligned.16x128b.x2.b32 {%r1, %r2, %r3, %r4}, [%r5]
tcgen05.st.sync.aligned.16x32bx2.x1.b32 [%r1], 16, {%r2}
tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r2], %rd1, %r3, {%r4, %r5, %r6, %r7}, %p1
tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, %p1, 1, 1, 0, 0
wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3
{%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, %rd1, %p1, 1, 1
wgmma.wait_group.sync.aligned 0
"""
"""`;` or the end of a line ends an instruction, unless the next line begins with an operand."""


def instructions() -> list[str]:
    joined = LEGAL.replace("\n[", " [").replace("\n{", " {")
    return [text.strip() for line in joined.split("\n") for text in line.split(";") if text.strip()]
