//! Empty; the crate exists for `tests/layers.rs`, which checks the dependencies of the workspace.
#![forbid(unsafe_code)]
