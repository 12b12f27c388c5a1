//! `<portolan/install.h>`: converts between numbers and bytes, and `portolan::extension`.

use std::ffi::{c_char, c_void};
use std::os::fd::{AsFd, IntoRawFd};
use std::slice;

use libc::c_int;
use portolan::extension::{self, Extension, Map, Object};
use portolan::qos::Refused;
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::own::{Fault, Numbered, invalid, text};
use crate::raw;

/// `struct portolan_spec`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct InstallRequest {
    name: *const c_char,
    object: *const c_void,
    length: usize,
    priority: u32,
    reserved: u32,
}

static EXTENSIONS: Numbered<Extension> = Numbered::new();

own! {
    "install.h", Fault;

    /// `int portolan_extension_install(const struct portolan_spec *, const int *, size_t)`
    fn portolan_extension_install(request: *const InstallRequest, sockets: *const c_int, count: usize) -> c_int {
        if sockets.is_null() || count == 0 {
            return Err(invalid("for at least one socket").into());
        }
        // SAFETY: by the contract there are `count` descriptors.
        let sockets = unsafe { slice::from_raw_parts(sockets, count) };
        // SAFETY: by the contract.
        let (name, priority, object) = unsafe { read(request) }?;
        Ok(EXTENSIONS.enter(extension::install(sockets, &name, priority, object)?)?)
    }

    /// `int portolan_extension_install_raw(const struct portolan_spec *, int)`
    fn portolan_extension_install_raw(request: *const InstallRequest, flow: c_int) -> c_int {
        // SAFETY: by the contract.
        let (name, priority, object) = unsafe { read(request) }?;
        let flow = raw::FLOWS.find(flow)?;
        Ok(EXTENSIONS.enter(flow.install(&name, priority, object)?)?)
    }

    /// `int portolan_extension_remove(int)`
    fn portolan_extension_remove(extension: c_int) -> c_int {
        // Another thread may be using a map of it.
        drop(EXTENSIONS.take(extension)?);
        Ok(0)
    }

    /// `int portolan_extension_number(int)`
    fn portolan_extension_number(extension: c_int) -> c_int {
        Ok(EXTENSIONS.find(extension)?.number().into())
    }

    /// `int portolan_map_get(int, const char *, const void *, size_t, void *, size_t)`
    fn portolan_map_get(
        extension: c_int,
        map: *const c_char,
        key: *const c_void,
        key_size: usize,
        value: *mut c_void,
        value_size: usize,
    ) -> c_int {
        let extension = EXTENSIONS.find(extension)?;
        // SAFETY: by the contract.
        let key = unsafe { bytes(key, key_size) }?;
        if value.is_null() {
            return Err(Errno::FAULT.into());
        }
        // SAFETY: by the contract.
        let found = unsafe { map_of(&extension, map) }?.get(key)?;
        if value_size != found.len() {
            return Err(invalid("values of the map have another size").into());
        }
        // SAFETY: by the contract there is room for `value_size` bytes.
        unsafe { slice::from_raw_parts_mut(value.cast::<u8>(), value_size) }.copy_from_slice(&found);
        Ok(0)
    }

    /// `int portolan_map_set(int, const char *, const void *, size_t, const void *, size_t)`
    fn portolan_map_set(
        extension: c_int,
        map: *const c_char,
        key: *const c_void,
        key_size: usize,
        value: *const c_void,
        value_size: usize,
    ) -> c_int {
        let extension = EXTENSIONS.find(extension)?;
        // SAFETY: by the contract.
        let (key, value) = unsafe { (bytes(key, key_size)?, bytes(value, value_size)?) };
        // SAFETY: by the contract.
        unsafe { map_of(&extension, map) }?.set(key, value)?;
        Ok(0)
    }

    /// `int portolan_map_remove(int, const char *, const void *, size_t)`
    fn portolan_map_remove(
        extension: c_int,
        map: *const c_char,
        key: *const c_void,
        key_size: usize,
    ) -> c_int {
        let extension = EXTENSIONS.find(extension)?;
        // SAFETY: by the contract.
        let key = unsafe { bytes(key, key_size) }?;
        // SAFETY: by the contract.
        unsafe { map_of(&extension, map) }?.remove(key)?;
        Ok(0)
    }

    /// `int portolan_map_descriptor(int, const char *)`
    fn portolan_map_descriptor(extension: c_int, map: *const c_char) -> c_int {
        let extension = EXTENSIONS.find(extension)?;
        // SAFETY: by the contract.
        let map = unsafe { map_of(&extension, map) }?;
        Ok(fcntl_dupfd_cloexec(map.as_fd(), 0)?.into_raw_fd())
    }
}

/// # Safety
/// `request` is null, or points to a structure whose pointers are null or valid as described there.
unsafe fn read(request: *const InstallRequest) -> Result<(String, u8, Object), Fault> {
    if request.is_null() {
        return Err(Errno::FAULT.into());
    }
    // SAFETY: the caller's promise.
    let request = unsafe { request.read() };
    // SAFETY: the caller's promise.
    let name = unsafe { text(request.name) }?.ok_or_else(|| invalid("an extension has a name"))?;
    let priority =
        u8::try_from(request.priority).map_err(|_| invalid("priorities are 0 to 255"))?;
    if request.reserved != 0 {
        return Err(invalid("what is reserved is to be 0").into());
    }
    // SAFETY: the caller's promise.
    let object = Object::parse(unsafe { bytes(request.object, request.length) }?);
    let object = object.map_err(|error| Refused::new(Errno::INVAL, error.to_string()))?;
    Ok((name, priority, object))
}

/// # Safety
/// `start` is null, or `length` bytes can be read from there during the call.
unsafe fn bytes<'a>(start: *const c_void, length: usize) -> Result<&'a [u8], Errno> {
    if start.is_null() {
        return Err(Errno::FAULT);
    }
    // No object is larger.
    isize::try_from(length).map_err(|_| Errno::INVAL)?;
    // SAFETY: the caller's promise.
    Ok(unsafe { slice::from_raw_parts(start.cast::<u8>(), length) })
}

/// # Safety
/// `name` is null or a C string.
unsafe fn map_of(extension: &Extension, name: *const c_char) -> Result<&Map, Refused> {
    // SAFETY: the caller's promise.
    let name = unsafe { text(name) }?.unwrap_or_default();
    let found = extension.map(&name);
    found.ok_or_else(|| Refused::new(Errno::NOENT, format!("there is no map {name:?}")))
}
