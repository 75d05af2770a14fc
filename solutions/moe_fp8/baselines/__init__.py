"""Peers: the same layer on public kernel libraries, as solutions beside ours.

Each file is a straightforward best use of the package that its docstring names. No peer shares a
kernel with ours. `triton_stages` has the stages that the libraries leave to their user.
"""
