//! Benchmarks of Portolan beside the kernel's stack, on one bed, in one run.
