//! The calls of the checker and how it shows what they answer, for other tests that speak libc too.

// Some calls are given pointers that the kernel must refuse; it is the kernel that follows them.
#[allow(clippy::not_unsafe_ptr_arg_deref)]
pub mod call;
pub mod show;
