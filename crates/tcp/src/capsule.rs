//! The capsule: a connection as bytes, on the way from one holder to the next.
//!
//! A capsule is one byte with the version and then fields, each in the place that its type's list gives it
//! (`fields!`, `variants!`), whatever the type looks like in memory: numbers in little-endian order, times as nanoseconds,
//! a byte for whether there is something and for which of several it is, a number before as many bytes or items. A list
//! that changes is a new [`VERSION`]; `tests/golden` of `portolan-stack` has capsules of each.
//!
//! Whoever wrote a capsule may be hostile. What [`parse`] returns holds every invariant that the code relies on, and all
//! else is refused with the reason.

use crate::connection::Connection;
pub use crate::encoding::{Encoded, Invalid, Reader, Refused, VERSION, Writer};
use crate::queue::HandoffBuffer;

/// Writes what a holder has of `connection`. Bytes that lie elsewhere ([`Connection::handoff`]) travel beside it.
pub fn encode(connection: &Connection, out: &mut Writer) {
    connection.put(out);
}

/// The connection that is the rest of a capsule, and what travelled beside it.
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

/// A capsule of `connection` alone.
pub fn to_bytes(connection: &Connection) -> Vec<u8> {
    let mut out = Writer::new(connection.stored());
    encode(connection, &mut out);
    out.finish()
}

/// The connection of a capsule of [`to_bytes`].
pub fn from_bytes(capsule: &[u8]) -> Result<Connection, Refused> {
    parse(Reader::new(capsule)?, None)
}
