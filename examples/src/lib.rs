//! What the examples share.

use portolan::extension::{Extension, Object};
use portolan::raw::{Errno, RawFlow};

/// Installs the handler of an object file on a flow, for as long as the answer lives. Why not is said.
pub fn install(flow: &RawFlow, object: &str) -> Result<Extension, Errno> {
    let bytes = std::fs::read(object).map_err(|_| Errno::NOENT)?;
    let object = Object::parse(&bytes).map_err(|fault| {
        eprintln!("{fault}");
        Errno::NOEXEC
    })?;
    flow.install("handler", 128, object).map_err(|refused| {
        eprintln!("{refused}");
        refused.errno
    })
}
