//! Finds out which C library a program is linked to. The proxy interposes the symbols of glibc, so it works only in
//! programs that glibc's loader loads.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linkage {
    /// Linked to glibc, or a script, whose interpreter is not checked.
    Glibc,
    /// Another loader, which lacks glibc's symbols and would refuse to start the program with the proxy.
    Other,
    Static,
}

/// Returns how the program is linked that the shell would run by this name.
pub fn of_program(name: &OsStr) -> Linkage {
    let path = find(name);
    let bytes = path.and_then(|path| fs::read(path).ok());
    bytes.map_or(Linkage::Glibc, |bytes| of_image(&bytes))
}

pub fn find(name: &OsStr) -> Option<PathBuf> {
    if Path::new(name).components().count() > 1 {
        return Some(name.into());
    }
    let directories = env::var_os("PATH")?;
    env::split_paths(&directories)
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}

/// Decides by the interpreter that a 64-bit ELF image requests (elf(5)).
fn of_image(image: &[u8]) -> Linkage {
    /// Types of program headers (`p_type`).
    const PT_LOAD: u32 = 1;
    const PT_INTERP: u32 = 3;
    let Some(headers) = headers(image) else {
        return Linkage::Glibc;
    };
    let kind = |header: &[u8]| u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
    let interpreter = headers
        .clone()
        .find(|header| kind(header) == PT_INTERP)
        .and_then(|header| image.get(number(header, 8)?..)?.get(..number(header, 32)?));
    match interpreter {
        Some(name) if contains(name, b"ld-linux") => Linkage::Glibc,
        Some(_) => Linkage::Other,
        None if headers.clone().any(|header| kind(header) == PT_LOAD) => Linkage::Static,
        None => Linkage::Glibc,
    }
}

fn headers(image: &[u8]) -> Option<impl Iterator<Item = &[u8]> + Clone> {
    /// Size of a program header in bytes.
    const HEADER: usize = 56;
    if !image.starts_with(b"\x7fELF\x02") {
        return None;
    }
    let count = u16::from_ne_bytes([*image.get(56)?, *image.get(57)?]);
    let table = image.get(number(image, 32)?..)?;
    let table = table.get(..HEADER * usize::from(count))?;
    Some(table.chunks_exact(HEADER))
}

fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..)?.first_chunk()?;
    usize::try_from(u64::from_ne_bytes(*bytes)).ok()
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes an image with one program header, followed by `text`.
    fn image(kind: u32, text: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 64 + 56];
        image[..5].copy_from_slice(b"\x7fELF\x02");
        image[32] = 64;
        image[56] = 1;
        image[64..68].copy_from_slice(&kind.to_ne_bytes());
        image[72] = 120;
        image[96] = text.len() as u8;
        image.extend_from_slice(text);
        image
    }

    #[test]
    fn an_interpreter_tells_the_c_library() {
        let glibc = image(3, b"/lib64/ld-linux-x86-64.so.2\0");
        assert_eq!(of_image(&glibc), Linkage::Glibc);
        let musl = image(3, b"/lib/ld-musl-x86_64.so.1\0");
        assert_eq!(of_image(&musl), Linkage::Other);
        assert_eq!(of_image(&image(1, b"")), Linkage::Static);
    }

    #[test]
    fn what_is_no_program_or_cut_off_is_left_to_the_kernel() {
        assert_eq!(of_image(b"#!/bin/sh\n"), Linkage::Glibc);
        let musl = image(3, b"/lib/ld-musl-x86_64.so.1\0");
        for length in 0..musl.len() {
            of_image(&musl[..length]);
        }
    }

    #[test]
    fn programs_are_found_as_the_shell_does() {
        assert_eq!(find(OsStr::new("./x")), Some("./x".into()));
        assert!(find(OsStr::new("sh")).is_some_and(|path| path.is_absolute()));
        assert_eq!(of_program(OsStr::new("env")), Linkage::Glibc);
    }
}
