//! The Linux errno values that the server answers with. The numbers are those of x86-64 and
//! aarch64; this crate has no operating system to take them from.

/// An error number as `Reply::Error` carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    pub const PERM: Errno = Errno(1);
    pub const IO: Errno = Errno(5);
    pub const BADF: Errno = Errno(9);
    pub const AGAIN: Errno = Errno(11);
    pub const NOMEM: Errno = Errno(12);
    pub const ACCES: Errno = Errno(13);
    pub const BUSY: Errno = Errno(16);
    pub const INVAL: Errno = Errno(22);
    pub const NFILE: Errno = Errno(23);
    pub const MFILE: Errno = Errno(24);
    pub const PROTO: Errno = Errno(71);
    pub const OPNOTSUPP: Errno = Errno(95);
    pub const AFNOSUPPORT: Errno = Errno(97);
    pub const ADDRINUSE: Errno = Errno(98);
    pub const ADDRNOTAVAIL: Errno = Errno(99);
    pub const NETUNREACH: Errno = Errno(101);
    pub const CONNABORTED: Errno = Errno(103);
    pub const CONNRESET: Errno = Errno(104);
    pub const NOBUFS: Errno = Errno(105);
    pub const ISCONN: Errno = Errno(106);
    pub const NOTCONN: Errno = Errno(107);
    pub const TIMEDOUT: Errno = Errno(110);
    pub const CONNREFUSED: Errno = Errno(111);
    pub const HOSTUNREACH: Errno = Errno(113);
    pub const ALREADY: Errno = Errno(114);
    pub const DQUOT: Errno = Errno(122);
}
