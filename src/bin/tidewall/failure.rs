//! How a command ends when it does not end well: a message, and a number that scripts can go by.

use std::io;
use tidewall::Error;

pub const REFUSED: u8 = 1;
pub const USAGE: u8 = 2;
pub const DAMAGED: u8 = 3;
pub const LOCKED: u8 = 4;
pub const OTHER: u8 = 5;

/// The end of a command that failed.
#[derive(Debug)]
pub struct Failure {
    pub code: u8,
    /// `None`: all has been said already.
    pub message: Option<String>,
}

impl Failure {
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Failure { code, message: Some(message.into()) }
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Failure::new(USAGE, message)
    }

    pub fn silent(code: u8) -> Self {
        Failure { code, message: None }
    }

    /// The end of a command that looks for damage: a reader that went away does not make a store sound.
    pub fn of_damage(is_damaged: bool, told: io::Result<()>) -> Result<(), Self> {
        match told {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
            _ if is_damaged => Err(Failure::new(DAMAGED, "damage was found: see above")),
            _ => Ok(()),
        }
    }

    /// A failure of the file system outside of the store.
    pub fn io(what: &str, error: &io::Error) -> Self {
        Failure::new(OTHER, format!("{what}: {error}"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::Fenced { .. }
            | Error::UnknownToken { .. }
            | Error::TokenJump { .. }
            | Error::TokensExhausted
            | Error::StaleOperation { .. }
            | Error::Duplicate { .. }
            | Error::NeedsFloor { .. }
            | Error::Conflict { .. }
            | Error::Held { .. }
            | Error::NotHeld { .. }
            | Error::Expired { .. }
            | Error::Timeout { .. } => REFUSED,
            Error::InvalidArgument(_) | Error::TooLarge { .. } => USAGE,
            Error::Corrupt { .. } => DAMAGED,
            Error::Locked { .. } => LOCKED,
            _ => OTHER,
        };
        Failure::new(code, error.to_string())
    }
}

/// Of the standard output: a reader that went away ends the command, quietly and well.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::silent(0),
            _ => Failure::io("writing to the standard output", &error),
        }
    }
}
