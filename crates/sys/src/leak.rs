//! Globals that are initialised once, at run time, and never freed: an `AtomicPtr` to leaked memory.

use std::sync::atomic::{AtomicPtr, Ordering};

/// The value that [`store`] put into the cell.
pub fn load<T: Sync>(cell: &'static AtomicPtr<T>) -> Option<&'static T> {
    // SAFETY: the cell is written only by `store` or set to null, and what `store` leaks is never freed.
    unsafe { cell.load(Ordering::Acquire).as_ref() }
}

/// Leaks `value` and stores it in the cell. Nothing else may write the cell, except for setting it
/// to null.
pub fn store<T: Sync>(cell: &'static AtomicPtr<T>, value: T) -> &'static T {
    let leaked: &'static T = Box::leak(Box::new(value));
    cell.store(std::ptr::from_ref(leaked).cast_mut(), Ordering::Release);
    leaked
}
