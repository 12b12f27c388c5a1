//! Whether sockets obey the host's own policy.

use serde::Deserialize;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum HostPolicy {
    /// Where the host has netfilter or policy rules, new sockets are the kernel's.
    #[default]
    Obey,
    /// Such rules do not apply to Portolan's sockets.
    Ignore,
}
