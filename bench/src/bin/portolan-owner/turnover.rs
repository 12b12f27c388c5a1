//! Extensions that come and go as fast as the server lets them.

use std::io::BufRead;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use portolan::extension::{Object, Port, check};

use crate::Failure;

/// How long one order keeps it busy.
const SPELL: Duration = Duration::from_millis(500);

/// Installs and removes, one after the other for a spell, or has the same verified only while one stands, as each line of
/// the input says, and prints how many.
pub fn turn_over(local: SocketAddr, object: &Path) -> Result<(), Failure> {
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
                // It is removed when it is dropped here.
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
