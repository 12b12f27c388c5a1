//! Guarantees: which fit, and what each is then. Sums and formulas only.

pub mod cpu;
pub mod transmit;
