//! Randomness from the kernel.

use std::cell::RefCell;

/// Returns bytes of the kernel's generator, which is read in large pieces.
pub(crate) fn random_bytes<const N: usize>() -> [u8; N] {
    thread_local! {
        static POOL: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    const { assert!(N <= GENERATED) }
    POOL.with_borrow_mut(|pool| {
        if pool.len() < N {
            *pool = generated().to_vec();
        }
        let rest = pool.len() - N;
        let bytes = pool[rest..].try_into().expect("N bytes");
        pool.truncate(rest);
        bytes
    })
}

/// Requests of this size are complete and without error once the generator is seeded, which the call waits for.
const GENERATED: usize = 256;

fn generated() -> [u8; GENERATED] {
    let mut bytes = [0; GENERATED];
    let flags = rustix::rand::GetRandomFlags::empty();
    let filled = rustix::rand::getrandom(&mut bytes, flags);
    assert_eq!(filled, Ok(bytes.len()), "the kernel has a random generator");
    bytes
}

pub(crate) fn random_u32() -> u32 {
    u32::from_ne_bytes(random_bytes())
}

pub(crate) fn random_u64() -> u64 {
    u64::from_ne_bytes(random_bytes())
}
