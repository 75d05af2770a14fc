"""FP8 block-scaled mixture-of-experts layer of one expert-parallel rank, in CuTe DSL.

One file a generation of the optimisation (`v1_loop_padding`, `v2_vectorised`, ...), all of them on
the shared kernel core in `core`, with the interchangeable pieces in `parts`.
"""
