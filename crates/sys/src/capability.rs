//! Which of the privileges that the server needs the process has.

use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

/// A privilege the server uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// Taps, filters, routes.
    NetAdmin,
    /// Raw access to devices.
    NetRaw,
    /// Loading programs and maps.
    Bpf,
    /// Loading programs that read kernel memory through helpers.
    Perfmon,
    /// Thread priorities.
    SysNice,
}

/// Capabilities a server uses if it has them: statistics of extensions and program IDs (SYS_ADMIN), ports below the
/// first unprivileged one, more descriptors, the group of its socket, and cgroup files not owned by root.
const BESIDES: CapabilitySet = CapabilitySet::SYS_ADMIN
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_RESOURCE)
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::DAC_OVERRIDE);

impl Capability {
    pub const ALL: [Capability; 5] = [
        Capability::NetAdmin,
        Capability::NetRaw,
        Capability::Bpf,
        Capability::Perfmon,
        Capability::SysNice,
    ];

    /// The name in capabilities(7).
    pub const fn name(self) -> &'static str {
        match self {
            Capability::NetAdmin => "CAP_NET_ADMIN",
            Capability::NetRaw => "CAP_NET_RAW",
            Capability::Bpf => "CAP_BPF",
            Capability::Perfmon => "CAP_PERFMON",
            Capability::SysNice => "CAP_SYS_NICE",
        }
    }

    fn set(self) -> CapabilitySet {
        match self {
            Capability::NetAdmin => CapabilitySet::NET_ADMIN,
            Capability::NetRaw => CapabilitySet::NET_RAW,
            Capability::Bpf => CapabilitySet::BPF,
            Capability::Perfmon => CapabilitySet::PERFMON,
            Capability::SysNice => CapabilitySet::SYS_NICE,
        }
    }

    /// Whether the calling thread has it in effect. CAP_SYS_ADMIN implies the two that were once part
    /// of it.
    pub fn in_effect(self) -> bool {
        let Ok(sets) = capabilities(None) else {
            return false;
        };
        let parted = matches!(self, Capability::Bpf | Capability::Perfmon);
        sets.effective.contains(self.set())
            || parted && sets.effective.contains(CapabilitySet::SYS_ADMIN)
    }

    /// Permanently drops the capabilities that no server uses, from the calling thread and those it starts.
    pub fn renounce_others() -> Result<(), Errno> {
        let used = Capability::ALL
            .into_iter()
            .fold(BESIDES, |used, one| used | one.set());
        let mut sets = capabilities(None)?;
        for set in [
            &mut sets.effective,
            &mut sets.permitted,
            &mut sets.inheritable,
        ] {
            *set &= used;
        }
        set_capabilities(None, sets)
    }

    /// Permanently drops it from the calling thread, and CAP_SYS_ADMIN, which may imply it.
    pub fn renounce(self) -> Result<(), Errno> {
        let mut sets = capabilities(None)?;
        let gone = self.set() | CapabilitySet::SYS_ADMIN;
        sets.effective.remove(gone);
        sets.permitted.remove(gone);
        set_capabilities(None, sets)
    }

    /// The capabilities that the calling thread lacks.
    pub fn missing() -> impl Iterator<Item = Capability> {
        Capability::ALL.into_iter().filter(|one| !one.in_effect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_lacks_nothing() {
        assert!(rustix::process::geteuid().is_root(), "tests run as root");
        assert_eq!(Capability::missing().next(), None);
    }

    #[test]
    fn what_no_server_uses_goes_and_the_rest_stays() {
        std::thread::spawn(|| {
            Capability::renounce_others().unwrap();
            assert_eq!(Capability::missing().next(), None);
            let sets = capabilities(None).unwrap();
            assert!(!sets.effective.contains(CapabilitySet::SYS_MODULE));
            assert!(!sets.permitted.contains(CapabilitySet::SETUID));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn what_a_thread_renounces_it_lacks_and_others_do_not() {
        std::thread::spawn(|| {
            Capability::Perfmon.renounce().unwrap();
            let missing: Vec<Capability> = Capability::missing().collect();
            assert_eq!(missing, [Capability::Perfmon]);
        })
        .join()
        .unwrap();
        assert!(Capability::Perfmon.in_effect());
    }
}
