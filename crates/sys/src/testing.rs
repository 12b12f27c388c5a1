//! What several unit tests of this crate share.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::namespace;

/// Plain shared memory of `length` zero octets.
pub(crate) fn memory(length: usize) -> OwnedFd {
    let fd = memfd_create("portolan-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, length as u64).unwrap();
    fd
}

/// Runs `test` on a thread of its own in a network namespace of its own. Needs root.
pub(crate) fn in_fresh_namespace(test: impl FnOnce() + Send + 'static) {
    std::thread::spawn(move || {
        let fresh = namespace::create().expect("root may create namespaces");
        namespace::enter(fresh).expect("root may enter namespaces");
        test();
    })
    .join()
    .expect("the test inside the namespace passes");
}

/// Runs `ip` with the words of `arguments`, in the calling thread's namespace.
pub(crate) fn ip(arguments: &str) {
    let status = std::process::Command::new("ip")
        .args(arguments.split_whitespace())
        .status()
        .unwrap();
    assert!(status.success(), "ip {arguments}");
}
