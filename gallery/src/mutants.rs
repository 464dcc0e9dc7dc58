//! Small changes of the source, made by rule: every one that no test finds is a test missing, or has its reason in
//! `SURVIVORS.md`.
//!
//! All of them are put in at once, each behind a switch, as the bugs are: one build, and a run of tests for each.

use proc_macro2::Span;
use std::collections::BTreeMap;
use std::ops::Range;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{BinOp, Block, Expr, ImplItemFn, Item, ItemFn, ReturnType, Stmt, Type, UnOp};

/// One small change.
#[derive(Clone, Debug)]
pub struct Mutant {
    /// The file, the function, what stands there, and what stands there instead.
    pub name: String,
    /// The bytes of the file that it replaces.
    range: Range<usize>,
    text: String,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// In place of an expression.
    Expression,
    /// In front of the first statement of a function.
    Body,
    /// A statement less.
    Statement,
}

/// The changes that the rules make of a file.
pub fn mutants(file: &str, source: &str) -> Result<Vec<Mutant>, String> {
    let parsed = syn::parse_file(source).map_err(|e| format!("{file}: {e}"))?;
    let mut finder = Finder { file, source, function: Vec::new(), found: Vec::new() };
    finder.visit_file(&parsed);
    let mut times: BTreeMap<String, u32> = BTreeMap::new();
    for mutant in &mut finder.found {
        let time = times.entry(mutant.name.clone()).or_default();
        *time += 1;
        if *time > 1 {
            mutant.name = format!("{} ({time})", mutant.name);
        }
    }
    Ok(finder.found)
}

struct Finder<'s> {
    file: &'s str,
    source: &'s str,
    function: Vec<String>,
    found: Vec<Mutant>,
}

impl Finder<'_> {
    fn text(&self, span: Span) -> &str {
        &self.source[span.byte_range()]
    }

    fn add(&mut self, span: Span, text: String, kind: Kind, shown: &str) {
        let before = match kind {
            Kind::Body => "{…}".to_owned(),
            _ => self.text(span).split_whitespace().collect::<Vec<_>>().join(" "),
        };
        let function = self.function.last().map_or("", |name| name);
        let name = format!("{} {function}: {} → {shown}", self.file, short(&before));
        self.found.push(Mutant { name, range: span.byte_range(), text, kind });
    }

    fn replace(&mut self, span: Span, text: String) {
        let shown = short(&text.split_whitespace().collect::<Vec<_>>().join(" "));
        self.add(span, text, Kind::Expression, &shown);
    }

    fn condition(&mut self, condition: &Expr) {
        if !has_let(condition) && !matches!(condition, Expr::Lit(_)) {
            for value in ["true", "false"] {
                self.replace(condition.span(), value.to_owned());
            }
        }
    }

    fn function(&mut self, name: &syn::Ident, output: &ReturnType, block: &Block) {
        let values: &[&str] = match output {
            ReturnType::Default if block.stmts.len() > 1 => &["()"],
            ReturnType::Default => &[],
            ReturnType::Type(_, what) => values_of(what),
        };
        self.function.push(name.to_string());
        // What follows a `return` in front of one lone literal would be the same again.
        for value in values {
            let span = block.brace_token.span.open();
            self.add(span, format!("return {value};"), Kind::Body, value);
        }
    }
}

fn values_of(what: &Type) -> &'static [&'static str] {
    let Type::Path(path) = what else { return &[] };
    let Some(last) = path.path.segments.last() else { return &[] };
    match &*last.ident.to_string() {
        "bool" => &["true", "false"],
        "Option" => &["None"],
        "u32" | "u64" | "usize" => &["0", "1"],
        "Vec" => &["Vec::new()"],
        "Result" => match &last.arguments {
            syn::PathArguments::AngleBracketed(inner) => match inner.args.first() {
                Some(syn::GenericArgument::Type(Type::Tuple(unit))) if unit.elems.is_empty() => &["Ok(())"],
                Some(syn::GenericArgument::Type(Type::Path(path))) if path.path.is_ident("bool") => {
                    &["Ok(true)", "Ok(false)"]
                }
                _ => &[],
            },
            _ => &[],
        },
        _ => &[],
    }
}

fn short(text: &str) -> String {
    if text.chars().count() <= 70 {
        return text.to_owned();
    }
    text.chars().take(66).chain("…".chars()).collect()
}

fn has_let(expr: &Expr) -> bool {
    match expr {
        Expr::Let(_) => true,
        Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        Expr::Paren(inner) => has_let(&inner.expr),
        _ => false,
    }
}

fn is_test(attributes: &[syn::Attribute]) -> bool {
    let is_one = |attribute| quote::ToTokens::to_token_stream(attribute).to_string().contains("test");
    attributes.iter().any(is_one)
}

/// What stands in place of an operator.
fn others(op: &BinOp) -> &'static [&'static str] {
    match op {
        BinOp::Eq(_) => &["!="],
        BinOp::Ne(_) => &["=="],
        BinOp::Lt(_) => &["<=", ">"],
        BinOp::Le(_) => &["<", ">"],
        BinOp::Gt(_) => &[">=", "<"],
        BinOp::Ge(_) => &[">", "<"],
        BinOp::And(_) => &["||"],
        BinOp::Or(_) => &["&&"],
        BinOp::Add(_) => &["-"],
        BinOp::Sub(_) => &["+"],
        BinOp::Mul(_) => &["+"],
        BinOp::Div(_) | BinOp::Rem(_) => &["*"],
        BinOp::BitAnd(_) => &["|"],
        BinOp::BitOr(_) => &["&"],
        BinOp::AddAssign(_) => &["-="],
        BinOp::SubAssign(_) => &["+="],
        BinOp::BitOrAssign(_) => &["&="],
        _ => &[],
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Mod(module) if is_test(&module.attrs) => {}
            // Evaluated by the compiler, where no switch can be asked.
            Item::Const(_) | Item::Static(_) => {}
            Item::Impl(body)
                if body.trait_.as_ref().is_some_and(|(_, path, _)| {
                    path.segments.last().is_some_and(|last| last.ident == "Debug" || last.ident == "Display")
                }) => {}
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        if item.sig.constness.is_none() && !is_test(&item.attrs) {
            self.function(&item.sig.ident, &item.sig.output, &item.block);
            visit::visit_block(self, &item.block);
            self.function.pop();
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if item.sig.constness.is_none() && !is_test(&item.attrs) {
            self.function(&item.sig.ident, &item.sig.output, &item.block);
            visit::visit_block(self, &item.block);
            self.function.pop();
        }
    }

    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}

    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}

    fn visit_expr_repeat(&mut self, expr: &'ast syn::ExprRepeat) {
        self.visit_expr(&expr.expr);
    }

    fn visit_type(&mut self, _: &'ast Type) {}

    fn visit_pat(&mut self, _: &'ast syn::Pat) {}

    fn visit_generic_argument(&mut self, _: &'ast syn::GenericArgument) {}

    fn visit_stmt(&mut self, stmt: &'ast Stmt) {
        if let Stmt::Expr(expr, Some(_)) = stmt {
            let is_worth =
                matches!(expr, Expr::Call(_) | Expr::MethodCall(_) | Expr::Try(_) | Expr::Assign(_));
            let is_worth = is_worth || matches!(expr, Expr::Binary(binary) if !others(&binary.op).is_empty());
            if is_worth {
                self.add(stmt.span(), String::new(), Kind::Statement, "nothing");
            }
        }
        visit::visit_stmt(self, stmt);
    }

    fn visit_expr_binary(&mut self, expr: &'ast syn::ExprBinary) {
        if !has_let(&expr.left) && !has_let(&expr.right) {
            let (left, right) =
                (self.text(expr.left.span()).to_owned(), self.text(expr.right.span()).to_owned());
            for other in others(&expr.op) {
                self.replace(expr.span(), format!("{left} {other} {right}"));
            }
        }
        visit::visit_expr_binary(self, expr);
    }

    fn visit_expr_unary(&mut self, expr: &'ast syn::ExprUnary) {
        if matches!(expr.op, UnOp::Not(_)) {
            let inner = self.text(expr.expr.span()).to_owned();
            self.replace(expr.span(), inner);
        }
        visit::visit_expr_unary(self, expr);
    }

    fn visit_expr_if(&mut self, expr: &'ast syn::ExprIf) {
        self.condition(&expr.cond);
        visit::visit_expr_if(self, expr);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let other = match &*call.method.to_string() {
            "max" => "min",
            "min" => "max",
            "max_by_key" => "min_by_key",
            "saturating_add" => "saturating_sub",
            "saturating_sub" => "saturating_add",
            "any" => "all",
            "all" => "any",
            "is_some" => "is_none",
            "is_none" => "is_some",
            "first" => "last",
            _ => "",
        };
        if !other.is_empty() {
            let (from, to) = (call.span().byte_range(), call.method.span().byte_range());
            let text =
                format!("{}{other}{}", &self.source[from.start..to.start], &self.source[to.end..from.end]);
            self.replace(call.span(), text);
        } else if call.method == "filter" {
            let receiver = self.text(call.receiver.span()).to_owned();
            self.replace(call.span(), receiver);
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if let Some((_, guard)) = &arm.guard {
            self.condition(guard);
        }
        visit::visit_arm(self, arm);
    }
}

/// The source with these changes in it, each behind its switch; marked, so that what does not build is found.
pub fn seeded(source: &str, mutants: &[(usize, &Mutant)]) -> String {
    render(source, 0..source.len(), mutants)
}

fn render(source: &str, range: Range<usize>, mutants: &[(usize, &Mutant)]) -> String {
    let mut out = String::new();
    let mut at = range.start;
    // The outermost first; of those on the same bytes each lies in the other's way when it is off.
    let mut rest: Vec<(usize, &Mutant)> = mutants
        .iter()
        .copied()
        .filter(|(_, mutant)| range.start <= mutant.range.start && mutant.range.end <= range.end)
        .collect();
    rest.sort_by_key(|(_, mutant)| (mutant.range.start, std::cmp::Reverse(mutant.range.end)));
    while let Some(&(_, outer)) = rest.first() {
        let outer_range = outer.range.clone();
        let (same, others): (Vec<_>, Vec<_>) = rest
            .iter()
            .copied()
            .partition(|(_, mutant)| mutant.range == outer_range && mutant.kind == outer.kind);
        let (inside, behind): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|(_, mutant)| mutant.range.start < outer_range.end);
        out.push_str(&source[at..outer_range.start]);
        let mut text = if outer_range == range && inside.is_empty() {
            source[outer_range.clone()].to_owned()
        } else {
            render(source, outer_range.clone(), &inside)
        };
        for (number, mutant) in &same {
            let on = format!("crate::seeded::is({number})");
            let changed = format!("/*<{number}*/ {} /*{number}>*/", mutant.text);
            text = match mutant.kind {
                Kind::Expression => format!("(if {on} {{ {changed} }} else {{ {text} }})"),
                Kind::Body => format!("{text} if {on} {{ {changed} }}"),
                // The condition too: the compiler points at it, where the statement is what sets a name.
                Kind::Statement => format!("/*<{number}*/ if !{on} {{ {text} }} /*{number}>*/"),
            };
        }
        out.push_str(&text);
        at = outer_range.end;
        rest = behind;
    }
    out.push_str(&source[at..range.end]);
    out
}

/// The change in which a byte of a seeded source lies, the innermost one.
pub fn at(seeded: &str, byte: usize) -> Option<usize> {
    let before = &seeded[..byte.min(seeded.len())];
    let mut open: Vec<usize> = Vec::new();
    for (start, _) in before.match_indices("/*") {
        let mark = before[start + 2..].split("*/").next().unwrap_or_default();
        if let Some(number) = mark.strip_prefix('<').and_then(|number| number.parse().ok()) {
            open.push(number);
        } else if let Some(number) = mark.strip_suffix('>').and_then(|number| number.parse::<usize>().ok()) {
            open.retain(|known| *known != number);
        }
    }
    open.pop()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "fn f(a: u32, b: u32) -> bool {\n    g();\n    a < b\n}\n";

    #[test]
    fn a_piece_of_source_is_changed_in_every_way_that_the_rules_know() {
        let names: Vec<String> =
            mutants("f.rs", SOURCE).unwrap().into_iter().map(|mutant| mutant.name).collect();
        let expected = ["{…} → true", "{…} → false", "g(); → nothing", "a < b → a <= b", "a < b → a > b"];
        assert_eq!(names, expected.map(|name| format!("f.rs f: {name}")));
        let tests = "#[cfg(test)]\nmod tests { fn f() -> bool { g(); true } }\nconst A: u32 = 1 + 2;";
        assert!(mutants("f.rs", tests).unwrap().is_empty());
        let twice = mutants("f.rs", "fn f() { g(1 + 2, 1 + 2); h() }").unwrap();
        assert!(twice.iter().any(|mutant| mutant.name == "f.rs f: 1 + 2 → 1 - 2 (2)"));
    }

    #[test]
    fn all_changes_stand_beside_each_other_and_are_found_by_their_place() {
        let found = mutants("f.rs", SOURCE).unwrap();
        let numbered: Vec<(usize, &Mutant)> = (1..).zip(&found).collect();
        let seeded = seeded(SOURCE, &numbered);
        syn::parse_file(&seeded).unwrap();
        for number in 1..=numbered.len() {
            assert_eq!(seeded.matches(&format!("is({number})")).count(), 1, "{seeded}");
            let inside = seeded.find(&format!("/*<{number}*/")).unwrap() + 8;
            assert_eq!(at(&seeded, inside), Some(number));
        }
        assert_eq!(at(&seeded, seeded.len() - 1), None);
        let condition = seeded.find("!crate::seeded::is(").unwrap();
        assert_eq!(at(&seeded, condition), Some(3), "g() is left out under that");
    }
}
