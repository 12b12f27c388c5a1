//! Nothing but the home of `tests/layers.rs`, which checks the dependencies of the workspace.
#![forbid(unsafe_code)]
