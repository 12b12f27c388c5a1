//! Single values behind pointers that an application gave as numbers (`ioctl`).

use rustix::io::Errno;

/// `EFAULT` for a null or misaligned pointer; other bad pointers fault, as in any library call.
pub fn read_int(pointer: usize) -> Result<i32, Errno> {
    let pointer = checked(pointer)?;
    // SAFETY: the caller of `ioctl` vouches for the pointer, as libc requires; it is not null and
    // is aligned.
    Ok(unsafe { pointer.read() })
}

/// As [`read_int`].
pub fn write_int(pointer: usize, value: i32) -> Result<(), Errno> {
    let pointer = checked(pointer)?;
    // SAFETY: as in `read_int`.
    unsafe { pointer.write(value) };
    Ok(())
}

fn checked(pointer: usize) -> Result<*mut i32, Errno> {
    let pointer = std::ptr::with_exposed_provenance_mut::<i32>(pointer);
    if pointer.is_null() || !pointer.is_aligned() {
        Err(Errno::FAULT)
    } else {
        Ok(pointer)
    }
}
