//! A global that is made once, late, and never freed: what an `AtomicPtr` to leaked memory is for.

use std::sync::atomic::{AtomicPtr, Ordering};

/// What [`store`] put there.
pub fn load<T: Sync>(cell: &'static AtomicPtr<T>) -> Option<&'static T> {
    // SAFETY: only `store` and a null store write the cell, and what `store` leaks lives forever.
    unsafe { cell.load(Ordering::Acquire).as_ref() }
}

/// Leaks `value` and puts it into the cell. The cell must be written by nothing else, but for
/// null.
pub fn store<T: Sync>(cell: &'static AtomicPtr<T>, value: T) -> &'static T {
    let leaked: &'static T = Box::leak(Box::new(value));
    cell.store(std::ptr::from_ref(leaked).cast_mut(), Ordering::Release);
    leaked
}
