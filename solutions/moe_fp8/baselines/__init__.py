"""Peers: the same layer on public kernel libraries, registered as solutions beside ours.

Each file says which package it is a straightforward best use of. None of them shares a kernel
with ours; `triton_stages` holds what the libraries leave to their user.
"""
