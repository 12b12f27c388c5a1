//! Decides whether a process or a program has the socket proxy, and if not, why.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;

use procfs::process::{MMapPath, Process};
use schemars::JsonSchema;
use serde::Serialize;

use crate::linkage::{self, Linkage};

/// The stack of new sockets, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Reason {
    /// The proxy is loaded, or would be loaded.
    Portolan,
    /// The process was not started with the proxy.
    NotLoaded,
    Static,
    OtherLibc,
    Go,
    /// The program changes its user or its capabilities when it starts.
    SetUser,
    /// A process of another user, which only root and that user may inspect.
    NotPermitted,
    /// There is no such program.
    NotFound,
}

impl Reason {
    pub(crate) fn of_process(process: &Process) -> Reason {
        let Ok(maps) = process.maps() else {
            return Reason::NotPermitted;
        };
        let is_proxy = |path: &MMapPath| match path {
            MMapPath::Path(path) => path.ends_with(crate::run::PRELOAD),
            _ => false,
        };
        let program = process.exe().ok();
        let of_program = program.map(|program| Reason::of_program(program.as_os_str()));
        let is_loaded = maps.iter().any(|map| is_proxy(&map.pathname));
        match of_program {
            Some(Reason::Go) => Reason::Go,
            _ if is_loaded => Reason::Portolan,
            None | Some(Reason::Portolan | Reason::NotFound) => Reason::NotLoaded,
            Some(reason) => reason,
        }
    }

    /// Decides by the program's file alone.
    pub(crate) fn of_program(name: &OsStr) -> Reason {
        let Some(path) = linkage::find(name).filter(|path| path.is_file()) else {
            return Reason::NotFound;
        };
        const SET_USER_OR_GROUP: u32 = 0o6000;
        let mode = path
            .metadata()
            .map_or(0, |metadata| metadata.permissions().mode());
        match linkage::of_program(path.as_os_str()) {
            _ if mode & SET_USER_OR_GROUP != 0 => Reason::SetUser,
            Linkage::Glibc => Reason::Portolan,
            Linkage::Static => Reason::Static,
            Linkage::Other => Reason::OtherLibc,
            Linkage::Go => Reason::Go,
        }
    }

    pub(crate) fn words(self) -> &'static str {
        match self {
            Reason::Portolan => "portolan: loads the socket proxy",
            Reason::NotLoaded => "kernel: has not loaded the socket proxy",
            Reason::Static => "kernel: is statically linked",
            Reason::OtherLibc => "kernel: is linked to another C library than glibc",
            Reason::Go => "kernel: is a Go program, which calls the kernel itself",
            Reason::SetUser => "kernel: is set-user-ID or set-group-ID",
            Reason::NotPermitted => "unknown: is another user's",
            Reason::NotFound => "is not there",
        }
    }

    /// Returns what the user can do about it.
    pub(crate) fn advice(self) -> Option<&'static str> {
        match self {
            Reason::Portolan => None,
            Reason::NotLoaded => {
                Some("start it with `portolan run`, or a service with `portolan enable UNIT`")
            }
            Reason::Static => {
                Some("link it dynamically to glibc (C: without -static; Rust: a target *-gnu)")
            }
            Reason::OtherLibc => Some("use a build of the program for glibc"),
            Reason::Go => {
                Some("put a proxy that uses glibc, such as HAProxy or nginx, on Portolan before it")
            }
            Reason::SetUser => Some(
                "the loader ignores LD_PRELOAD there: start it as its user, or grant capabilities by systemd",
            ),
            Reason::NotPermitted => Some("ask as root"),
            Reason::NotFound => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_this_machine_have_their_reasons() {
        for (name, reason) in [
            ("env", Reason::Portolan),
            ("/bin/su", Reason::SetUser),
            ("/nosuch/program", Reason::NotFound),
        ] {
            assert_eq!(Reason::of_program(OsStr::new(name)), reason, "{name}");
        }
    }
}
