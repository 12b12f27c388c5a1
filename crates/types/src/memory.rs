//! Memory that does not change.

use alloc::vec::Vec;
use core::any::Any;
use core::fmt::Debug;

/// Memory that cannot be changed while it is held.
pub trait Memory: Debug + Send + Sync {
    fn bytes(&self) -> &[u8];

    /// For downcasts by its creator.
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
