//! Single values behind pointers that an application gave as numbers (`ioctl`).

use rustix::io::Errno;

/// `EFAULT` for a null pointer; other bad pointers fault, as in any library call. It need not be
/// aligned: the kernel does not mind either.
pub fn read_int(pointer: usize) -> Result<i32, Errno> {
    let pointer = checked(pointer)?;
    // SAFETY: the caller of `ioctl` vouches for the pointer, as libc requires; it is not null.
    Ok(unsafe { pointer.read_unaligned() })
}

/// As [`read_int`].
pub fn write_int(pointer: usize, value: i32) -> Result<(), Errno> {
    let pointer = checked(pointer)?;
    // SAFETY: as in `read_int`.
    unsafe { pointer.write_unaligned(value) };
    Ok(())
}

fn checked(pointer: usize) -> Result<*mut i32, Errno> {
    let pointer = std::ptr::with_exposed_provenance_mut::<i32>(pointer);
    if pointer.is_null() {
        Err(Errno::FAULT)
    } else {
        Ok(pointer)
    }
}
