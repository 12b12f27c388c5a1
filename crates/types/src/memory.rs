//! Bytes that lie somewhere, and stay as they are.

use alloc::vec::Vec;
use core::any::Any;
use core::fmt::Debug;

/// Memory that nobody can change while it is held.
pub trait Memory: Debug + Send + Sync {
    fn bytes(&self) -> &[u8];

    /// For whoever made it, and knows more of it.
    fn as_any(&self) -> &dyn Any;
}

impl Memory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
