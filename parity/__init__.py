"""Numerical parity of two ways to run one model: logs of block diffusion, and their replay through Clover's loop."""
