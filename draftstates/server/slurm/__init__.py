"""The launcher `slurm`: servers as Slurm jobs of their own."""
