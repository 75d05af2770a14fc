"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

Every kernel here is launched with `use_pdl` and calls `wait_for_previous` before it touches memory
that the kernel before writes or reads; one that is handed rows while they are made (`handoff`)
waits for those, and for the kernel before at its end. Because all of them wait before they end, the
one before being complete means that all before it are. The next kernel is let go at once: its CTAs
become resident as this one's leave, set up, and wait in turn. A kernel from elsewhere, launched
without the attribute, waits for all of ours.

What the kernel before the last wrote can be read without a wait:

- Kernel N starts when every CTA of kernel N - 1 has let it go, which it does after its own wait.
- So kernel N - 2 is complete, and all before it: the second GEMM reads `expert_rows`, which the
  routing wrote.
- A second GEMM that is handed rows lets the combine go before it has waited. But what was complete
  when it started is so for the combine, too, which therefore reads `pair_row`.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

import cutlass.cute as cute


def wait_for_previous() -> None:
    """Until the kernel before is complete and its stores are visible; then let the next one go."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
