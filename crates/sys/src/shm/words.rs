//! Values in shared memory that are read and written word by word, without a lock.

use std::sync::atomic::Ordering::Relaxed;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::mapping::Mapping;

pub(super) const WORD: usize = size_of::<u64>();

pub(super) fn read<T: FromBytes + IntoBytes>(memory: &Mapping, offset: usize) -> T {
    let mut value = T::new_zeroed();
    for (index, chunk) in value.as_mut_bytes().chunks_mut(WORD).enumerate() {
        let word = memory.u64_at(offset + index * WORD).load(Relaxed);
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    value
}

pub(super) fn write<T: IntoBytes + Immutable>(memory: &Mapping, offset: usize, value: &T) {
    for (index, chunk) in value.as_bytes().chunks(WORD).enumerate() {
        let mut word = [0; WORD];
        word.copy_from_slice(chunk);
        let place = memory.u64_at(offset + index * WORD);
        place.store(u64::from_ne_bytes(word), Relaxed);
    }
}
