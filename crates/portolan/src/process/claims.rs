//! Protocols of this process's own: claimed when a raw flow opens, and again with the next server.

use portolan_proto::control::{ReplyBody, RequestBody, Reuse};
use portolan_proto::raw::Guard;
use portolan_sys::port_right::BoundPort;
use portolan_types::Slot;
use rustix::io::Errno;

use crate::process::Process;
use crate::process::control::Lost;

/// Claims a protocol for the frames at a slot. Returns the guard; that of a port has a number.
pub(crate) fn claim(process: &Process, guard: Guard, slot: Slot) -> Result<Guard, Errno> {
    let incarnation = process.incarnation();
    let request = || RequestBody::ClaimProtocol { guard, slot };
    let mut answer = process.control.call(request(), &[]);
    if let (
        Guard::Port { protocol, local },
        Ok((
            ReplyBody::Error {
                errno: libc::EACCES,
            },
            _,
        )),
    ) = (guard, &answer)
    {
        // A privileged port: the kernel decides who may bind it.
        let wanted = BoundPort {
            protocol,
            local,
            v6_only: false,
        };
        process.show_right_to(wanted, Reuse::default())?;
        answer = process.control.call(request(), &[]);
    }
    match answer {
        Ok((ReplyBody::Claimed { guard }, _)) => {
            if let Some(inbox) = process.lock().inboxes.get(slot) {
                inbox.note_claim(guard, incarnation);
            }
            Ok(guard)
        }
        Ok((ReplyBody::Error { errno }, _)) => Err(Errno::from_raw_os_error(errno)),
        Ok(_) => Err(Errno::PROTO),
        Err(Lost) => Err(Errno::NETDOWN),
    }
}

/// Claims again what was claimed of an earlier server. A flow whose protocol this one refuses ends. An error if a later
/// attempt may succeed.
pub(crate) fn claim_again(process: &Process) -> Result<(), Errno> {
    let claims = process
        .lock()
        .inboxes
        .claims_of_before(process.incarnation());
    for (slot, guard) in claims {
        match claim(process, guard, slot) {
            Ok(_) => {}
            Err(Errno::NETDOWN) => return Err(Errno::NETDOWN),
            Err(_) => {
                if let Some(inbox) = process.lock().inboxes.get(slot) {
                    inbox.cut_off();
                }
            }
        }
    }
    Ok(())
}
