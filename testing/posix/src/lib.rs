//! The calls of the checker and the format of their results, for other tests that use libc.

// Some calls are given invalid pointers; only the kernel dereferences them, and must refuse.
#[allow(clippy::not_unsafe_ptr_arg_deref)]
pub mod call;
pub mod show;
