//! Guarantees: which are admitted, and what each amounts to. Arithmetic only.

pub mod cpu;
pub mod transmit;
