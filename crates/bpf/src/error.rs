use std::io;

use portolan_types::ChannelId;

/// The programs could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("no permission to load eBPF programs: CAP_BPF and CAP_NET_ADMIN are needed")]
    NotPermitted,
    #[error("the kernel refuses the {object}: {source}")]
    Refused {
        object: &'static str,
        source: libbpf_rs::Error,
    },
    /// An object lacks a map or program that this crate knows.
    #[error("the compiled objects lack {name}")]
    Incomplete { name: &'static str },
}

/// A filter could not be attached to, or detached from, a device.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error("device {ifindex}: {source}")]
    Filter {
        ifindex: u32,
        source: libbpf_rs::Error,
    },
    #[error("device {ifindex}: cannot ask for its queueing disciplines: {source}")]
    Netlink { ifindex: u32, source: io::Error },
    #[error(transparent)]
    Table(#[from] TableError),
}

/// A row could not be written or removed.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    #[error("the table of {table} is full")]
    Full { table: &'static str },
    #[error("the table of {table}: {source}")]
    Refused {
        table: &'static str,
        source: libbpf_rs::Error,
    },
}

/// A channel could not be created.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    #[error("channel {} is beyond the limit", .0.0)]
    OutOfRange(ChannelId),
    #[error("cannot create the {what} of a channel: {source}")]
    Create {
        what: &'static str,
        source: libbpf_rs::Error,
    },
    #[error("cannot share the maps of a channel: {0}")]
    Share(#[from] io::Error),
    #[error(transparent)]
    Table(#[from] TableError),
}
