"""Measuring whole solutions: correctness, harness time, device time, stages, floors."""
