//! The capsule: a connection serialised for its transfer from one holder to the next.
//!
//! A capsule is one version byte, then fields in the order that the lists of their types give (`fields!`, `variants!`),
//! independent of the layout in memory: numbers in little-endian order, times as nanoseconds, one byte for an option or
//! the variant of an enum, and a count before bytes or items. A changed list needs a new [`VERSION`]; `tests/golden` of
//! `portolan-stack` has capsules of each.
//!
//! The author of a capsule may be hostile. A connection that [`parse`] returns holds every invariant that the code
//! relies on; anything else is refused with the reason.

use crate::connection::Connection;
pub use crate::encoding::{Encoded, Invalid, Reader, Refused, VERSION, Writer};
use crate::queue::HandoffBuffer;

/// Writes the state of `connection`. Bytes stored outside its ring ([`Connection::handoff`]) travel beside the capsule.
pub fn encode(connection: &Connection, out: &mut Writer) {
    connection.put(out);
}

/// Reads the connection from the rest of a capsule, together with the `handoff` that travelled beside it.
pub fn parse(mut from: Reader<'_>, handoff: Option<HandoffBuffer>) -> Result<Connection, Refused> {
    let mut connection = Connection::take(&mut from)?;
    from.end()?;
    if let Some(handoff) = handoff {
        connection.lead_with(handoff);
        if connection.handoff().is_none() {
            return Err(Refused::Unasked);
        }
    }
    connection.validate()?;
    Ok(connection)
}

/// Returns a capsule that contains only `connection`.
pub fn to_bytes(connection: &Connection) -> Vec<u8> {
    let mut out = Writer::new(connection.stored());
    encode(connection, &mut out);
    out.finish()
}

/// Reads the connection from a capsule made by [`to_bytes`].
pub fn from_bytes(capsule: &[u8]) -> Result<Connection, Refused> {
    parse(Reader::new(capsule)?, None)
}
