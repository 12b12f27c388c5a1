//! Helpers shared by the unit tests of this crate.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::process::{Child, Command, Output};
use std::sync::{RwLock, RwLockReadGuard};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::namespace;

/// Plain shared memory of `length` zero bytes.
pub(crate) fn memory(length: usize) -> OwnedFd {
    let fd = memfd_create("portolan-test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, length as u64).unwrap();
    fd
}

/// Runs `test` in a new thread and a new network namespace. Needs root.
pub(crate) fn in_fresh_namespace(test: impl FnOnce() + Send + 'static) {
    std::thread::spawn(move || {
        let fresh = namespace::create().expect("root may create namespaces");
        namespace::enter(fresh).expect("root may enter namespaces");
        test();
    })
    .join()
    .expect("the test inside the namespace passes");
}

/// Runs `action` in a thread of user nobody.
pub(crate) fn as_nobody<T: Send>(action: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let deprived = scope.spawn(|| {
            let nobody = Some(rustix::process::Uid::from_raw(65534));
            rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
            action()
        });
        deprived.join().expect("the action does not panic")
    })
}

/// Until it executes a program, a child has a copy of every descriptor of this process: no close of the test beside
/// it is the last one.
static FORKS: RwLock<()> = RwLock::new(());

/// Held by who forks, until the child has executed a program or ended.
pub(crate) fn forking() -> RwLockReadGuard<'static, ()> {
    FORKS.read().unwrap()
}

/// Closes what a test then expects to be gone for good.
pub(crate) fn last_close<T>(opened: T) {
    let _no_fork = FORKS.write().unwrap();
    drop(opened);
}

pub(crate) fn start(command: &mut Command) -> Child {
    let _fork = forking();
    command.spawn().expect("the program is installed")
}

pub(crate) fn run(command: &mut Command) -> Output {
    let _fork = forking();
    command.output().expect("the program is installed")
}

/// Runs `ip` with the words of `arguments` in the calling thread's namespace.
pub(crate) fn ip(arguments: &str) {
    let output = run(Command::new("ip").args(arguments.split_whitespace()));
    assert!(output.status.success(), "ip {arguments}: {output:?}");
}

/// The kernel's `BPF_MAP_TYPE_ARRAY` and `BPF_MAP_TYPE_RINGBUF`.
#[derive(Clone, Copy)]
pub(crate) enum BpfMap {
    Array = 2,
    Ring = 27,
}

/// Creates a BPF map by the bare system call. An array has one mmapable element of `size` bytes; a ring
/// has a data area of that size.
pub(crate) fn bpf_map(kind: BpfMap, size: usize) -> OwnedFd {
    const BPF_MAP_CREATE: libc::c_long = 0;
    const BPF_F_MMAPABLE: u32 = 1 << 10;
    // Type, key size, value size, entries, flags: the start of `union bpf_attr`.
    let attributes: [u32; 5] = match kind {
        BpfMap::Array => [kind as u32, 4, size as u32, 1, BPF_F_MMAPABLE],
        BpfMap::Ring => [kind as u32, 0, 0, size as u32, 0],
    };
    // SAFETY: the kernel reads as many bytes of the attributes as given.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_MAP_CREATE,
            attributes.as_ptr(),
            size_of_val(&attributes),
        )
    };
    assert!(fd >= 0, "bpf: {}", std::io::Error::last_os_error());
    // SAFETY: the kernel has just opened it.
    unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
}
