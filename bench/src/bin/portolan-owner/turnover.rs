//! Installs and removes extensions as fast as the server permits.

use std::io::BufRead;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use portolan::extension::{Object, Port, check};

use crate::Failure;

/// How long each order is carried out.
const SPELL: Duration = Duration::from_millis(500);

/// For each line of the input, either repeatedly installs and removes an extension, or repeatedly has it verified while
/// one is installed, and prints the count.
pub(crate) fn turn_over(local: SocketAddr, object: &Path) -> Result<(), Failure> {
    let object = Object::parse(&std::fs::read(object)?)?;
    let port = Port::open(local)?;
    println!("ready");
    for order in std::io::stdin().lock().lines() {
        let order = order?;
        let until = Instant::now() + SPELL;
        let _standing = match order.as_str() {
            "check" => Some(port.install("standing", 128, object.clone())?),
            _ => None,
        };
        let mut count = 0_u32;
        while Instant::now() < until {
            match order.as_str() {
                // Dropping the extension removes it.
                "install" => drop(port.install("fleeting", 128, object.clone())?),
                "check" => drop(check(object.clone())?),
                _ => return Err("neither `install` nor `check`".into()),
            }
            count += 1;
        }
        println!("{count}");
    }
    Ok(())
}
