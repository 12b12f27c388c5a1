//! A mail server: eight clients of one program, each of which opens a connection for each session.

use super::case;
use crate::Effort;
use crate::bed::Side;
use crate::process::run;
use crate::services::dovecot;
use crate::suites::conns::PYTHON;
use crate::suites::{Case, number};

const PORT: u16 = 7143;

const CLIENTS: &str = include_str!("imap.py");

/// Dovecot has a process for each login, which passes the connection to a process of the user.
pub(super) fn dovecot(effort: Effort) -> Case {
    let seconds = effort.scaled(3.0).to_string();
    case(
        "app-dovecot-8",
        "sessions/s",
        ["dovecot", PYTHON],
        move |bed, stack| {
            let _server = dovecot::serve(bed, stack, PORT, "words")?;
            let (address, port) = (bed.server.address.to_string(), PORT.to_string());
            let mut clients = bed.command(Side::Client, stack, PYTHON);
            clients.args(["-S", "-E", "-c", CLIENTS, &address, &port, "8", &seconds]);
            number("python3", &run(&mut clients)?, &["per_second"])
        },
    )
}
