"""What every generation uses: problem, routing, torch model, kernels, compilation."""
